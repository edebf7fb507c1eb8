# SPDX-License-Identifier: Apache-2.0
"""A run that is stopped and resumed from its newest step ends with the bits of one that was never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from tests.helpers import FEATURES, Program, adam, descend, make_net, momentum_sgd, same_bits, sgd, simulate, train

RECIPES: dict[str, Any] = {
    "sync": momentum_sgd,
    "sync(codec='int8', reproducible=True)": momentum_sgd,
    "one_bit(warmup=2)": momentum_sgd,
    "one_bit_adam(warmup=7)": adam,
    "power(rank=1, warmup=2)": momentum_sgd,
    "top_k(ratio=0.2, warmup=0)": momentum_sgd,
    "averaging(period=3, warmup=4)": momentum_sgd,
    "averaging(period=3, overlap=2, codec='one_bit')": adam,
    "bmuf(period=3)": momentum_sgd,
    "bmuf(period=4, overlap=4, fragments=2)": momentum_sgd,
    "bmuf_adam(period=3)": adam,
    "diloco(period=3, overlap=1)": adam,
    "streaming_diloco(period=3, fragments=2)": adam,
}
COMMON: dict[str, Any] = {"samples": 50, "norm": True, "dropout": 0.2, "schedule": True, "epochs": 3}


def kept(path: Path, every: int = 1, **more: Any) -> dict[str, Any]:
    """Settings of a run that keeps steps."""
    return {"checkpoint": path, "every_blocks": every, **more}


def steps(path: Path) -> list[int]:
    """The steps in a directory."""
    return sorted(int(one.name.removeprefix("step-")) for one in path.glob("step-*") if "." not in one.name)


@pytest.mark.parametrize(
    ("rule", "workers"), [*((rule, 3) for rule in RECIPES), *((rule, 1) for rule in [*RECIPES][::4])]
)
def test_stopped_twice_and_resumed(rule: str, workers: int, tmp_path: Path) -> None:
    choices = {**COMMON, "optimizer": RECIPES[rule]}
    whole = train(rule, workers, **choices)
    for stop_at in (6, 11, None):
        outs = train(rule, workers, **choices, stop_at=stop_at, settings=kept(tmp_path, every=2))
    assert all(same_bits(one.model, other.model) for one, other in zip(outs, whole, strict=True))
    assert all(same_bits(one.exported, other.exported) for one, other in zip(outs, whole, strict=True))
    assert outs[0].minibatches == whole[0].minibatches
    if workers > 1:  # one that is alone writes behind its back, and may have been stopped before anything was written
        assert len(outs[0].losses) < whole[0].minibatches


def test_keeping_steps_changes_nothing_and_keeps_the_newest(tmp_path: Path) -> None:
    choices = {**COMMON, "optimizer": adam}
    whole = train("bmuf_adam(period=3)", 2, **choices)
    outs = train("bmuf_adam(period=3)", 2, **choices, settings=kept(tmp_path, keep=2))
    assert all(same_bits(one.model, other.model) for one, other in zip(outs, whole, strict=True))
    assert steps(tmp_path) == [18, 21]  # of 21 minibatches each
    resumed = simulate(Program("bmuf_adam(period=3)", resume=tmp_path / "step-000000018", **choices), 2)
    assert same_bits(resumed[0].model, whole[0].model)


def test_a_merge_right_after_a_block_does_not_end_the_checkpoints(tmp_path: Path) -> None:
    """All workers merge with nothing of their own then, which is no sign that one has left."""

    def program() -> int:
        model = make_net()
        optimizer = sgd(model.parameters())
        run = paceline.attach(model, optimizer, "bmuf(period=2)", checkpoint=tmp_path, every_blocks=1, keep=100)
        with run:
            share = run.share(torch.randn(32, FEATURES).split(4))  # two blocks of each of two workers
            for _ in range(3):
                for inputs in share:
                    descend(model, optimizer, inputs)
                run.merge()
        return run.minibatches

    assert simulate(program, 2) == [12, 12]
    found = sorted(int(one.name.removeprefix("step-")) for one in tmp_path.glob("step-*"))
    assert max(found) > 8, found
