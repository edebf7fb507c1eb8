# SPDX-License-Identifier: Apache-2.0
"""Make accelerate treat each worker as one device, and share its prepared loaders.

All objects of accelerate share the state of the process, in a few dictionaries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from accelerate.data_loader import DataLoaderStateMixin, SeedableRandomSampler
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, send_to_device
from torch.utils.data import BatchSampler, RandomSampler

from paceline.data.sharing.loader_registry import SharedLoader
from paceline.doors.adapters.adapter import Adapter, AdapterLoader
from paceline.errors import UnsupportedError

STATES = (PartialState, AcceleratorState, GradientState)
"""accelerate's classes with state of the process."""


def one_device(adapter: Adapter, cpu: bool = False) -> None:
    """Make accelerate see one device, with the worker's rank as process index.

    Raises:
        UnsupportedError: accelerate is configured for more than data parallelism.
    """
    kind = PartialState(cpu=cpu).distributed_type
    if kind not in (DistributedType.NO, *(one for one in DistributedType if one.name.startswith("MULTI_"))):
        raise UnsupportedError(
            adapter.world.sign(
                f"accelerate is configured for {kind.value}, which shards a model itself; remove it from "
                "its configuration, or train without paceline"
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
    """accelerate's state, for each virtual worker of a simulation."""

    def __init__(self) -> None:
        self.take()

    def take(self) -> None:
        self._saved = [dict(state._shared_state) for state in STATES]

    def put(self) -> None:
        for state, saved in zip(STATES, self._saved, strict=True):
            state._shared_state.clear()
            state._shared_state.update(saved)


class PreparedLoader(AdapterLoader, DataLoaderStateMixin):  # type: ignore[misc]
    """A worker's part of a prepared loader: puts batches on the device, and marks the last one."""

    def __init__(self, loader: Any, adapter: Adapter) -> None:
        super().__init__(_original(loader), adapter)
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


def _original(loader: Any) -> Any:
    """The original loader, without accelerate's seeded sampler: a run shuffles by its own seed."""
    base = getattr(loader, "base_dataloader", loader)
    batches = getattr(base, "batch_sampler", None)
    if type(batches) is not BatchSampler:
        return base
    sampler = batches.sampler
    if isinstance(sampler, SeedableRandomSampler):
        sampler = RandomSampler(sampler.data_source, sampler.replacement, sampler._num_samples)
    result = copy.copy(base)
    # torch refuses assignments
    result.__dict__.update(sampler=sampler, batch_size=batches.batch_size, drop_last=batches.drop_last)
    return result
