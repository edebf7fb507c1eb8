# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer (extra `paceline[lightning]`)::

    trainer = Trainer(strategy=PacelineStrategy("bmuf", period=16), max_epochs=5)

started with `paceline run --workers 4 train.py`. Lightning starts no process. The training data are shared, so that
each sample is used once an epoch. Every worker validates the global model on all data, so that `EarlyStopping` and
`ModelCheckpoint` decide alike. Rank 0 logs and writes: the global model's weights, and the run's state in a folder
beside the checkpoint (`last.ckpt.paceline`).

The workers of a host take the devices of `Trainer(devices=...)` in turn. Steps (`max_steps`, schedules,
`trainer.global_step`) count for one worker.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from paceline.core.lazy import needed
from paceline.doors.adapters.adapter import FOLDER, Adapter, AdapterLoader
from paceline.doors.adapters.lightning_workers import WorkersMixin, state_folder
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule

with needed("the adapter for Lightning", "lightning"):
    from lightning.pytorch.strategies import ParallelStrategy
    from lightning.pytorch.trainer.states import TrainerFn

OTHER_WORLD_SIZE = (
    "its counts of steps and epochs depend on the number of workers; resume with as many, or start from its weights "
    "with load_from_checkpoint"
)


class PacelineStrategy(WorkersMixin, ParallelStrategy):  # type: ignore[misc]
    """Trains under a rule of paceline.

    Args:
        rule: as for `paceline.attach`.
        accelerator, checkpoint_io, precision_plugin: as for every strategy of Lightning.
        settings: other settings of `paceline.attach`, and the rule's, such as `period=16`.
    """

    strategy_name = "paceline"
    is_distributed = property(lambda self: self.adapter.distributed)  # so that sync_dist=True reduces over the workers

    def __init__(
        self,
        rule: Rule | str | None = None,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)
        self.adapter = Adapter("Lightning", rule, settings)
        self._evaluating = contextlib.ExitStack()
        self._from: tuple[Path, int] | None = None  # folder and minibatches of the checkpoint to resume from

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer if self.lightning_module is not None else None

    # -- setting up -------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        if self._layer_sync is not None:
            raise UnsupportedError(
                "sync_batchnorm=True exchanges in every forward pass, which paceline's rules do not; leave it out "
                "(running statistics are averaged with the model)"
            )
        # no sampler of Lightning's own: the training data are shared, and every worker evaluates on all
        self._trainer._accelerator_connector.use_distributed_sampler = False
        super().setup_environment()
        self.set_world_ranks()

    def model_to_device(self) -> None:
        assert self.model is not None
        self.model.to(self.root_device)

    def process_dataloader(self, dataloader: Any) -> Any:
        if not self.adapter.distributed or not self._trainer.training:
            return dataloader
        return AdapterLoader(dataloader, self.adapter, lambda: int(self._trainer.current_epoch))

    def on_train_start(self) -> None:
        # not in setup, so that a checkpoint has been loaded into model and optimizers
        if self._trainer.ckpt_path is not None and self.adapter.distributed and self._from is None:
            raise self.adapter.unsupported(
                f"{self._trainer.ckpt_path} was written by one worker, and {OTHER_WORLD_SIZE}"
            )
        self.adapter.attach(self.lightning_module, self.optimizers, getattr(self.precision_plugin, "scaler", None))
        if self._from is not None:
            self.adapter.resume(*self._from)
            self._from = None

    # -- steps ------------------------------------------------------------------------------------

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        run, plugin = self.adapter.open_run, self.precision_plugin
        gradients = run is not None and run.world.size > 1 and run.rule.steps_with_gradients
        if not gradients or getattr(plugin, "scaler", None) is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        # gradients are exchanged between backward and step, so the closure runs before the step
        result = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        optimizer.step(**kwargs)
        return result

    def block_backward_sync(self) -> contextlib.AbstractContextManager[None]:
        return self.adapter.no_sync()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        return self.reduced(tensor, reduce_op)

    # -- the global model -------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        self._evaluating.enter_context(self.adapter.global_model())

    def on_validation_end(self) -> None:
        self._evaluating.close()

    @contextlib.contextmanager
    def _own_model(self) -> Iterator[None]:
        """Inside, the model holds the worker's own values, also during validation."""
        validating = self._trainer.validating and self.adapter.open_run is not None
        self._evaluating.close()
        try:
            yield
        finally:
            if validating:
                self.on_validation_start()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        run = self.adapter.open_run
        return {**super().lightning_module_state_dict(), **(run._state.global_parts() if run is not None else {})}

    # -- checkpoints ------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        run = self.adapter.open_run
        if run is not None and self.adapter.distributed and "optimizer_states" in checkpoint:
            filepath = self.broadcast(str(filepath))  # a name may contain a worker's own metric
            with self._own_model():
                run.save(state_folder(filepath))
            checkpoint[FOLDER] = {"workers": run.world.size, "minibatches": run.minibatches}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        made = checkpoint.get(FOLDER)
        if made is not None and self._trainer.state.fn == TrainerFn.FITTING:
            if made["workers"] != self.adapter.world.size:
                raise self.adapter.unsupported(
                    f"{checkpoint_path} was written by {made['workers']} workers, and {OTHER_WORLD_SIZE}"
                )
            self._from = state_folder(checkpoint_path), made["minibatches"]
        return checkpoint

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        if self.is_global_zero and "://" not in str(filepath):
            shutil.rmtree(state_folder(filepath), ignore_errors=True)

    # -- the end ----------------------------------------------------------------------------------

    def on_train_end(self) -> None:
        self._evaluating.close()
        self.adapter.close()

    def on_exception(self, exception: BaseException) -> None:
        self._evaluating.close()
        self.adapter.abandon()
        super().on_exception(exception)
