# SPDX-License-Identifier: Apache-2.0
"""To accelerate, each worker is alone with its device: its state, and the loaders that it has prepared.

accelerate keeps its state once for a process, in dictionaries that all its objects share.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderStateMixin, SeedableRandomSampler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import BatchSampler, RandomSampler

from paceline.data.sharing.shared_loader import SharedLoader
from paceline.doors.adapters.adapter import Adapter, AdapterLoader
from paceline.errors import UnsupportedError

STATES = (PartialState, AcceleratorState, GradientState)
"""What accelerate keeps once for a process."""


def one_device(adapter: Adapter, cpu: bool = False) -> None:
    """Let accelerate take this worker for one device alone, with the rank of the worker.

    Raises:
        UnsupportedError: accelerate is to do more than data parallelism.
    """
    kind = PartialState(cpu=cpu).distributed_type
    if kind not in (DistributedType.NO, *(one for one in DistributedType if one.name.startswith("MULTI_"))):
        raise UnsupportedError(
            adapter.world.sign(
                f"accelerate is configured for {kind.value}, which spreads a model over processes itself; take it "
                "out of its configuration, or train without paceline"
            )
        )
    for state in STATES[:2]:
        if state._shared_state:
            state._shared_state.update(
                distributed_type=DistributedType.NO,
                num_processes=1,
                process_index=adapter.world.rank,
                local_process_index=adapter.world.local_rank,
            )
    adapter.belongs(_States())


class _States:
    """Under a simulation: what accelerate knows of this worker."""

    def __init__(self) -> None:
        self.take()

    def take(self) -> None:
        self._kept = [dict(state._shared_state) for state in STATES]

    def put(self) -> None:
        for state, kept in zip(STATES, self._kept, strict=True):
            state._shared_state.clear()
            state._shared_state.update(kept)


class PreparedLoader(AdapterLoader, DataLoaderStateMixin):  # type: ignore[misc]
    """A worker's part of a loader that accelerate has prepared: batches on the device, and the last one announced."""

    def __init__(self, loader: Any, adapter: Adapter) -> None:
        super().__init__(_as_given(loader), adapter)
        self._device = getattr(loader, "device", None)
        self.gradient_state = GradientState()

    def __iter__(self) -> Iterator[Any]:
        self.begin()
        try:
            yield from super().__iter__()
        finally:
            self.end()

    def placed(self, batch: Any, share: SharedLoader) -> Any:
        self.end_of_dataloader = share.progress >= 1.0
        return batch if self._device is None else send_to_device(batch, self._device)


def _as_given(loader: Any) -> Any:
    """The loader that was prepared, with batches and sampler as they were before: a run shuffles by its own seed."""
    base = getattr(loader, "base_dataloader", loader)
    batches = getattr(base, "batch_sampler", None)
    if type(batches) is not BatchSampler:
        return base
    sampler = batches.sampler
    if isinstance(sampler, SeedableRandomSampler):
        sampler = RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)
    found = copy.copy(base)
    # torch refuses assignments
    found.__dict__.update(sampler=sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)
    return found
