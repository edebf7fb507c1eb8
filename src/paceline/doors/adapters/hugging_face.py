# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers (extra `paceline[transformers]`)::

    trainer = Trainer(model, args, train_dataset=data, callbacks=[PacelineCallback("bmuf", period=16)])

started with `paceline run --workers 4 train.py`. Under a launcher `TrainingArguments` let accelerate set up data
parallelism; the callback undoes that (:mod:`paceline.doors.adapters.one_device`), and the Trainer continues as on one
device. The training data are shared, so that each sample is used once an epoch. Every worker evaluates the global model
on all data. Only rank 0 logs and writes: the global model's weights, and the run's state in the checkpoint's folder
`paceline`.

`per_device_train_batch_size`, `max_steps`, the schedule and `state.global_step` count for one worker.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from paceline.checkpoint import read_manifest
from paceline.core.lazy import needed
from paceline.doors.adapters.adapter import FOLDER, Adapter
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.run.run import Run, TurnReports

with needed("the adapter for transformers' Trainer", "transformers"):
    import transformers.trainer
    from transformers import Trainer, TrainerCallback
    from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

    from paceline.doors.adapters.one_device import PreparedLoader, one_device

REFUSED = ("auto_find_batch_size", "deepspeed", "fsdp")
"""TrainingArguments that shard the model, or restart the training within itself."""


class PacelineCallback(TrainerCallback):  # type: ignore[misc]
    """Trains under a rule of paceline.

    Args:
        rule: as for `paceline.attach`.
        settings: other settings of `paceline.attach`, and the rule's, such as `period=16`.
    """

    def __init__(self, rule: Rule | str | None = None, **settings: Any) -> None:
        self.adapter = Adapter("transformers' Trainer", rule, settings)
        self._trainer: Any = None
        self._from: Path | None = None
        self._turns: TurnReports | None = None

    @property
    def run(self) -> Run | None:
        """The run of the last training."""
        return self.adapter.run

    # -- callbacks --------------------------------------------------------------------------------

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # a callback does not get its Trainer
        frame: FrameType | None = sys._getframe()
        while frame is not None and not isinstance(frame.f_locals.get("self"), Trainer):
            frame = frame.f_back
        if frame is not None:
            self.join(frame.f_locals["self"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        if trainer is None:
            raise UnsupportedError(
                "PacelineCallback was added to a Trainer that exists; give it to Trainer(..., callbacks=[...]), "
                "or call callback.join(trainer)"
            )
        accelerator = trainer.accelerator
        self.adapter.attach(trainer.model, trainer.optimizer.optimizer, accelerator.scaler)
        if self._from is not None:
            self.adapter.resume(self._from, state.global_step)
        if self.adapter.run is not None:
            self._turns = TurnReports(self.adapter.run._context.monitor.note)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._turns is not None:
            self._turns.report(state.global_step, state.max_steps)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.adapter.close()

    # -- the Trainer ------------------------------------------------------------------------------

    def join(self, trainer: Any) -> Any:
        """Add the callback to an existing `trainer`, and return it.

        Raises:
            UnsupportedError: an argument of the Trainer is not supported.
        """
        if self._trainer is trainer:
            return trainer
        for name in REFUSED:
            if getattr(trainer.args, name, None):
                raise UnsupportedError(
                    f"TrainingArguments have {name}={getattr(trainer.args, name)!r}, which paceline "
                    "does not support; leave it out"
                )
        one_device(self.adapter)
        self._trainer = trainer
        trainer.state.is_world_process_zero = trainer.is_world_process_zero()
        trainer.state.is_local_process_zero = trainer.is_local_process_zero()
        if not self.adapter.distributed:
            return trainer
        transformers.trainer.skip_first_batches = _skip
        self._wrap("train", self._training)
        self._wrap("get_train_dataloader", self._loader)
        for name in ("evaluation_loop", "save_model"):
            self._wrap(name, self._with_global_model)
        self._wrap("_save_checkpoint", self._save)
        self._wrap("_save_rng_state", self._by_rank_zero)
        self._wrap("_load_rng_state", self._unless_resumed)
        trainer.accelerator.no_sync = self._no_sync
        return trainer

    def _wrap(self, name: str, around: Callable[..., Any]) -> None:
        setattr(self._trainer, name, partial(around, getattr(self._trainer, name)))

    def _training(self, train: Callable[..., Any], resume_from_checkpoint: Any = None, **kwargs: Any) -> Any:
        self._from = self._state_folder(resume_from_checkpoint) if resume_from_checkpoint else None
        try:
            return train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)
        except BaseException:
            self.adapter.abandon()
            raise

    def _state_folder(self, checkpoint: Any) -> Path:
        """Paceline's folder in a checkpoint.

        Raises:
            UnsupportedError: another number of workers wrote it.
        """
        if checkpoint is True:
            checkpoint = transformers.trainer.get_last_checkpoint(self._trainer.args.output_dir)
        folder = Path(str(checkpoint)) / FOLDER
        workers = read_manifest(folder)["size"] if folder.is_dir() else 1
        if workers != self.adapter.world.size:
            raise self.adapter.unsupported(
                f"{checkpoint} was written by {workers} workers, and the Trainer counts an epoch by one "
                "worker's steps; resume with as many workers, or start from its weights with from_pretrained"
            )
        return folder

    def _loader(self, make: Callable[[], Any]) -> Any:
        return PreparedLoader(make(), self.adapter)

    def _with_global_model(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self.adapter.global_model():
            return call(*args, **kwargs)

    def _save(self, save: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        save(*args, **kwargs)
        run, trainer = self.adapter.open_run, self._trainer
        if run is not None and not trainer.args.save_only_model:
            step = f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}"
            run.save(Path(trainer._get_output_dir(None)) / step / FOLDER)

    def _by_rank_zero(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if self.adapter.world.rank == 0 else None

    def _unless_resumed(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs) if self._from is None else None

    def _no_sync(self, model: Any) -> contextlib.AbstractContextManager[None]:
        return self.adapter.no_sync()


_skip_first = transformers.trainer.skip_first_batches


def _skip(loader: Any, number: int = 0) -> Any:
    """A shared loader continues at the run's position by itself."""
    return loader if isinstance(loader, PreparedLoader) else _skip_first(loader, number)
