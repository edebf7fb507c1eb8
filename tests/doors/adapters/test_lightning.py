# SPDX-License-Identifier: Apache-2.0
"""Lightning's Trainer, alone and with workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import paceline
from paceline.errors import UnsupportedError
from tests.doors.adapters.digits import Digits, all_once, loader, make_net, make_optimizer, plain_loop, state_of
from tests.helpers import same_bits, simulate

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:lightning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning"),
]

from lightning.fabric.plugins import TorchCheckpointIO  # noqa: E402
from lightning.pytorch import LightningModule, Trainer  # noqa: E402
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402

from paceline.doors.adapters.lightning import PacelineStrategy  # noqa: E402

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "max_epochs": 2,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


class Reader(LightningModule):
    """Notes what each validation has seen of the model."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = make_net(dropout)
        self.validated: list[dict[str, Tensor]] = []
        self.known: list[dict[str, Tensor]] = []

    def training_step(self, batch: dict[str, Tensor], number: int) -> Tensor:
        loss: Tensor = self.net(**batch)["loss"]
        self.log("train_loss", loss, batch_size=len(batch["x"]), sync_dist=True)
        return loss

    def validation_step(self, batch: dict[str, Tensor], number: int) -> None:
        self.log("val_loss", self.net(**batch)["loss"], batch_size=len(batch["x"]))
        run = getattr(self.trainer.strategy, "run", None)
        if run is not None and number == 0:
            self.validated.append(state_of(self))
            self.known.append(run.global_state())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.steps = int(self.trainer.estimated_stepping_batches)
        return make_optimizer(self)


class Written(TorchCheckpointIO):
    """Notes what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.paths: list[str] = []

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        self.paths.append(Path(path).name)
        super().save_checkpoint(checkpoint, path, storage_options)


def train(
    strategy: Any = "auto", *, dropout: float = 0.0, validate: bool = False, resume: Any = None, **settings: Any
) -> tuple[Reader, Trainer]:
    model = Reader(dropout)
    trainer = Trainer(strategy=strategy, **{**QUIET, "enable_checkpointing": "callbacks" in settings, **settings})
    torch.manual_seed(11)
    trainer.fit(model, loader(), torch.utils.data.DataLoader(Digits(30), 15) if validate else None, ckpt_path=resume)
    return model, trainer


def workers(rule: str, number: int = 2, /, **choices: Any) -> list[tuple[Reader, Trainer]]:
    rule_settings = choices.pop("rule_settings", {})
    return simulate(lambda: train(PacelineStrategy(rule, **rule_settings), **choices), number)


def test_one_worker_has_the_bits_of_lightning_alone() -> None:
    choices: dict[str, Any] = {"dropout": 0.2, "accumulate_grad_batches": 3, "gradient_clip_val": 0.5, "validate": True}
    alone, _ = train(**choices)
    ours, _ = train(PacelineStrategy("bmuf", period=4), **choices)
    assert same_bits(state_of(alone), state_of(ours))
    assert alone.net.seen == ours.net.seen


@pytest.mark.parametrize(
    ("rule", "settings", "every"),
    [("bmuf", {"period": 4}, 1), ("bmuf", {"period": 2}, 3), ("sync", {}, 1), ("sync", {}, 3)],
)
def test_two_workers_do_what_the_two_lines_do(rule: str, settings: dict[str, Any], every: int) -> None:
    found = workers(rule, rule_settings=settings, accumulate_grad_batches=every, gradient_clip_val=0.5)
    plain = simulate(lambda: plain_loop(rule, every=every, clip=0.5, **settings), 2)
    assert all_once([model.net.seen for model, _ in found])
    for (model, _), net in zip(found, plain, strict=True):
        assert same_bits(state_of(model.net), state_of(net))
    assert [trainer.is_global_zero for _, trainer in found] == [True, False]


def test_validation_and_checkpoints_take_the_global_model(tmp_path: Path) -> None:
    def body() -> tuple[Reader, Written]:
        writer = Written()
        strategy = PacelineStrategy("bmuf", period=4, checkpoint_io=writer)
        keep = ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
        return train(strategy, validate=True, callbacks=[keep])[0], writer

    found = simulate(body, 2)
    for model, _ in found:
        assert model.validated and all(map(same_bits, model.validated, model.known))
    assert [bool(writer.paths) for _, writer in found] == [True, False]
    kept = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert same_bits(kept["state_dict"], found[0][0].known[-1])
    assert not same_bits(kept["state_dict"], state_of(found[0][0])), "the end of the training merged the last block"
    assert sorted(path.name for path in tmp_path.glob("*.paceline")) == sorted(
        f"{path.name}.paceline" for path in tmp_path.glob("*.ckpt")
    )


@pytest.mark.parametrize("step", [5, 7])
def test_a_resume_has_the_same_bits(step: int, tmp_path: Path) -> None:
    keep = lambda: ModelCheckpoint(tmp_path, every_n_train_steps=step, save_top_k=-1, filename="{step}")  # noqa: E731
    whole = simulate(lambda: train(PacelineStrategy("bmuf", period=4), callbacks=[keep()])[0], 2)
    again = workers("bmuf", rule_settings={"period": 4}, resume=tmp_path / f"step={step}.ckpt")
    for one, (other, _) in zip(whole, again, strict=True):
        assert same_bits(state_of(one), state_of(other))
    with pytest.raises(UnsupportedError, match="written by 2 workers"):
        workers("bmuf", 1, rule_settings={"period": 4}, resume=tmp_path / f"step={step}.ckpt")


def test_what_does_not_go_together_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="leave checkpoint= out"):
        PacelineStrategy("bmuf", checkpoint=tmp_path)
    with pytest.raises(UnsupportedError, match="sync_batchnorm"):
        train(PacelineStrategy("bmuf"), sync_batchnorm=True)
    with pytest.raises(paceline.RuleError):
        train(PacelineStrategy("bmuff"))
    with pytest.raises(UnsupportedError, match="no pickled objects"):
        simulate(lambda: PacelineStrategy("bmuf").broadcast(object()), 2)
    monkeypatch.setenv("PACELINE_CONTROL", "localhost:1")
    with pytest.raises(UnsupportedError, match="--elastic"):
        PacelineStrategy("bmuf")
