# SPDX-License-Identifier: Apache-2.0
"""Lightning's Fabric (extra `paceline[lightning]`)::

    fabric = Fabric(strategy=PacelineFabricStrategy("bmuf", period=16))
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)   # attaches
    loader = fabric.setup_dataloaders(loader)           # shares
    ...
    fabric.strategy.close()

Fabric starts no process. Every loader that is set up is shared, so that each sample is used once an epoch, unless
`use_distributed_sampler=False`, for evaluation. `fabric.save` writes the global model, and the run's state into a
folder beside the file. A resumed loop continues at `fabric.strategy.run.epoch`.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import nn
from torch.optim import Optimizer

from paceline.core.lazy import needed
from paceline.doors.adapters.adapter import FOLDER, Adapter, AdapterLoader
from paceline.doors.adapters.lightning_workers import WorkersMixin, state_folder
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule

with needed("the adapter for Fabric", "lightning"):
    from lightning.fabric.strategies import ParallelStrategy
    from lightning.fabric.strategies.strategy import _BackwardSyncControl


class PacelineFabricStrategy(WorkersMixin, ParallelStrategy):  # type: ignore[misc]
    """Trains under a rule of paceline.

    Args:
        rule: as for `paceline.attach`.
        accelerator, checkpoint_io, precision: as for every strategy of Fabric.
        settings: further settings of `paceline.attach`, and the rule's, such as `period=16`.
    """

    def __init__(
        self,
        rule: Rule | str | None = None,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision=precision)
        self.adapter = Adapter("Fabric", rule, settings)
        self._backward_sync_control = _NoSync(self.adapter)
        self._model: nn.Module | None = None
        self._splits = False

    def close(self) -> None:
        """Close the run; the model is then the global one."""
        self.adapter.close()

    # -- setting up -------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        super().setup_environment()
        self.set_world_ranks()

    def module_to_device(self, module: nn.Module) -> None:
        module.to(self.root_device)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        if self.adapter.open_run is not None:
            raise UnsupportedError(
                "a model is set up already; close that run (fabric.strategy.close()), or pass all modules as one"
            )
        self._model = module
        self.adapter.attach(module, list(optimizers), getattr(self.precision, "scaler", None))
        return module, optimizers, scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        raise UnsupportedError(
            "paceline attaches to a model and its optimizers together; call fabric.setup(model, optimizer)"
        )

    @property
    def distributed_sampler_kwargs(self) -> None:
        """None, since Fabric needs no sampler of its own; it reads this only for loaders that are to be split."""
        self._splits = True

    def process_dataloader(self, dataloader: Any) -> Any:
        splits, self._splits = self._splits, False
        if not splits or not self.adapter.distributed:
            return dataloader
        shared = AdapterLoader(dataloader, self.adapter)
        shared.__dict__.update({**vars(dataloader), **vars(shared)})  # Fabric copies what it finds there
        return shared

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduced(tensor, reduce_op)

    # -- checkpoints ------------------------------------------------------------------------------

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        run = self.adapter.open_run if module is self._model else None
        return {**super().get_module_state_dict(module), **(run._state.global_parts() if run is not None else {})}

    def save_checkpoint(
        self, path: Any, state: dict[str, Any], storage_options: Any = None, filter: Any = None
    ) -> None:
        run = self.adapter.open_run
        if run is not None and self.adapter.distributed:
            path = self.broadcast(str(path))
            run.save(state_folder(path))
            state = {**state, FOLDER: {"workers": run.world.size, "minibatches": run.minibatches}}
        super().save_checkpoint(path, state, storage_options, filter)

    def load_checkpoint(self, path: Any, state: Any = None, strict: bool = True, weights_only: Any = None) -> Any:
        rest = super().load_checkpoint(path, state, strict, weights_only)
        if not state or self.adapter.open_run is None:
            return rest
        made = rest.pop(FOLDER, None)
        if made is not None:
            self.adapter.resume(state_folder(path), made["minibatches"])
        elif self.adapter.distributed:
            raise self.adapter.unsupported(
                f"{path} was written by one worker, and paceline is attached already; load it into model and "
                "optimizer before fabric.setup"
            )
        return rest


class _NoSync(_BackwardSyncControl):  # type: ignore[misc]
    """Excludes a backward pass from the exchange of gradients."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> contextlib.AbstractContextManager[None]:
        return self._adapter.no_sync() if enabled else contextlib.nullcontext()
