# SPDX-License-Identifier: Apache-2.0
"""accelerate (extra `paceline[accelerate]`)::

    accelerator = PacelineAccelerator("bmuf", period=16)                             # 1
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for batch in accelerator.share(loader):                                          # 2
        ...
    accelerator.end_training()

accelerate reads a launcher's variables, sets up torch.distributed, and would wrap the model in DistributedDataParallel
and split every loader. `one_device` undoes that: accelerate sees one device, and as process index the worker's rank, so
that only rank 0 writes and logs. `num_processes` is 1, a loader that is not shared is whole, and `gather` returns the
worker's own values (`accelerator.run.messages` gathers).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from paceline.core.lazy import needed
from paceline.doors.adapters.adapter import FOLDER, Adapter
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.run.run import Run

with needed("the adapter for accelerate", "accelerate"):
    from accelerate import Accelerator

    from paceline.doors.adapters.one_device import PreparedLoader, one_device


class PacelineAccelerator(Accelerator):  # type: ignore[misc]
    """An Accelerator that trains under a rule of paceline.

    Args:
        rule: as for `paceline.attach`.
        settings: further settings of `paceline.attach`, and the rule's, such as `period=16`.
        accelerator: arguments of `Accelerator`, such as `{"mixed_precision": "bf16"}`.
    """

    def __init__(
        self, rule: Rule | str | None = None, *, accelerator: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        arguments = dict(accelerator or {})
        self.adapter = Adapter("accelerate", rule, settings)
        for name in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin", "parallelism_config"):
            if arguments.get(name) is not None:
                raise UnsupportedError(
                    f"{name} shards a model over processes, and each worker of paceline holds all of it"
                )
        one_device(self.adapter, cpu=bool(arguments.get("cpu")))
        super().__init__(**arguments)
        one_device(self.adapter)

    @property
    def run(self) -> Run:
        """The run; first use attaches it to all prepared models and optimizers."""
        if self.adapter.run is None:
            models = [self.unwrap_model(model, keep_torch_compile=False) for model in self._models]
            optimizers = [prepared.optimizer for prepared in self._optimizers]
            if not models or not optimizers:
                raise self.adapter.unsupported(
                    f"{len(models)} models and {len(optimizers)} optimizers are prepared; call "
                    "accelerator.prepare(model, optimizer, ...) first"
                )
            self.adapter.attach(models[0] if len(models) == 1 else models, optimizers, self.scaler)
        assert self.adapter.run is not None
        return self.adapter.run

    def share(self, loader: Any) -> Any:
        """This worker's part of the training data; each sample of an epoch is on one worker."""
        run = self.run
        return PreparedLoader(loader, self.adapter) if self.adapter.distributed else run.share(loader)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """As Accelerator's; refuses batches that do not come from `accelerator.share`."""
        if (
            self.adapter.distributed
            and not self.run.samples
            and not self.run.minibatches
            and self.run._context.loaders.idle
        ):
            raise self.adapter.unsupported(
                "no batch came from accelerator.share(loader), so every worker would train on the same data; "
                "iterate with `for batch in accelerator.share(loader)`"
            )
        super().backward(loss, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, model: Any) -> Iterator[None]:
        """Do not exchange gradients of the backward passes inside."""
        with self.run.no_sync():
            yield

    def wait_for_everyone(self) -> None:
        """Barrier of all workers."""
        self.adapter.transport.barrier()

    def get_state_dict(self, model: Any, unwrap: bool = True) -> Any:
        """The global parameters, for the trained model."""
        run = self.adapter.open_run
        if run is None or len(self._models) != 1 or self.unwrap_model(model) is not self.unwrap_model(self._models[0]):
            return super().get_state_dict(model, unwrap)
        return {**super().get_state_dict(model, unwrap), **run._state.global_parts()}

    def save_state(self, output_dir: Any = None, **kwargs: Any) -> Any:
        """As Accelerator's, with the run's state in the subfolder `paceline`."""
        run = self.adapter.open_run
        with self.adapter.global_model():
            folder = super().save_state(output_dir, **kwargs)
        if run is not None and self.adapter.distributed:
            run.save(Path(folder) / FOLDER)
        return folder

    def load_state(self, input_dir: Any = None, **kwargs: Any) -> None:
        """As Accelerator's; a resumed loop continues at `accelerator.run.epoch`."""
        if input_dir is None:
            raise UnsupportedError("name the checkpoint: accelerator.load_state(folder)")
        ours = Path(input_dir) / FOLDER
        if not ours.is_dir() and self.adapter.open_run is not None and self.adapter.distributed:
            raise self.adapter.unsupported(
                f"{input_dir} was written by one worker, and paceline is attached already; load it before the "
                "first accelerator.share"
            )
        super().load_state(input_dir, **kwargs)
        if ours.is_dir():
            assert self.run is not None
            self.adapter.resume(ours)

    def end_training(self) -> None:
        """Close the run; the model is then the global one."""
        self.adapter.close()
        super().end_training()
