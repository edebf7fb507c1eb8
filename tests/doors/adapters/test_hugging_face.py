# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers, alone and with workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from paceline.errors import UnsupportedError
from tests.doors.adapters.digits import (
    BATCH,
    EPOCHS,
    Digits,
    Net,
    all_once,
    make_net,
    make_optimizer,
    plain_loop,
    state_of,
)
from tests.helpers import same_bits, simulate

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainerCallback, TrainingArguments

from paceline.doors.adapters.hugging_face import PacelineCallback
from tests.doors.adapters.test_accelerate import _fresh  # noqa: F401


class Evaluated(TrainerCallback):  # type: ignore[misc]
    """Notes what evaluations have seen of the model, and which checkpoints were written."""

    def __init__(self, adapter: PacelineCallback | None) -> None:
        self.adapter, self.known, self.saved = adapter, [], []

    def on_prediction_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if self.adapter is not None:
            assert same_bits(state_of(model), self.adapter.run.global_state())
            self.known.append(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.saved.append(state.global_step)


def train(
    folder: Path,
    callback: PacelineCallback | None = None,
    *,
    dropout: float = 0.0,
    resume: Any = None,
    evaluate: bool = False,
    late: bool = False,
    **arguments: Any,
) -> tuple[Net, Trainer, Evaluated]:
    net = make_net(dropout)
    every: dict[str, Any] = {"max_grad_norm": 0.0, "save_strategy": "no", "seed": 11}
    args = TrainingArguments(
        str(folder),
        num_train_epochs=EPOCHS,
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        lr_scheduler_type="constant",
        remove_unused_columns=False,
        eval_strategy="epoch" if evaluate else "no",
        **{**every, **arguments},
    )
    seen = Evaluated(callback)
    early = [callback] if callback is not None and not late else []
    trainer = Trainer(
        net,
        args,
        train_dataset=Digits(),
        eval_dataset=Digits(30),
        callbacks=[*early, seen],
        optimizers=(make_optimizer(net), None),
    )
    if late:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resume)
    return net, trainer, seen


def test_one_worker_has_the_bits_of_the_trainer_alone(tmp_path: Path) -> None:
    choices: dict[str, Any] = {"dropout": 0.2, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5, "evaluate": True}
    alone, _, _ = train(tmp_path, **choices)
    ours, _, _ = train(tmp_path, PacelineCallback("bmuf", period=4), **choices)
    assert same_bits(state_of(alone), state_of(ours))
    assert alone.seen == ours.seen


@pytest.mark.parametrize(("rule", "settings", "clip"), [("bmuf", {"period": 4}, 0.0), ("sync", {}, 0.5)])
def test_two_workers_do_what_the_two_lines_do(rule: str, settings: dict[str, Any], clip: float, tmp_path: Path) -> None:
    found = simulate(lambda: train(tmp_path, PacelineCallback(rule, **settings), max_grad_norm=clip), 2)
    plain = simulate(lambda: plain_loop(rule, clip=clip or None, **settings), 2)
    assert all_once([net.seen for net, _, _ in found])
    for (net, trainer, _), other in zip(found, plain, strict=True):
        assert same_bits(state_of(net), state_of(other))
        assert trainer.state.global_step == 14
    assert [trainer.state.is_world_process_zero for _, trainer, _ in found] == [True, False]


@pytest.mark.parametrize("step", [5, 7])
def test_checkpoints_hold_the_global_model_and_resume_to_the_same_bits(step: int, tmp_path: Path) -> None:
    every: dict[str, Any] = {"save_strategy": "steps", "save_steps": step, "evaluate": True}
    whole = simulate(lambda: train(tmp_path / "a", PacelineCallback("bmuf", period=4), **every), 2)
    folder = tmp_path / "a" / f"checkpoint-{step}"
    kept = load_file(folder / "model.safetensors")
    assert same_bits(kept, load_file(folder / "paceline" / "global.safetensors"))
    assert json.loads((folder / "trainer_state.json").read_text())["is_world_process_zero"]
    assert all(seen.known for _, _, seen in whole)
    again = simulate(lambda: train(tmp_path / "b", PacelineCallback("bmuf", period=4), resume=str(folder), **every), 2)
    for (one, _, _), (other, _, _) in zip(whole, again, strict=True):
        assert same_bits(state_of(one), state_of(other))
    with pytest.raises(UnsupportedError, match="written by 2 workers"):
        simulate(lambda: train(tmp_path / "b", PacelineCallback("bmuf", period=4), resume=str(folder), **every), 3)
