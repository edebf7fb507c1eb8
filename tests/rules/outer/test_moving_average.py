# SPDX-License-Identifier: Apache-2.0
"""The moving average of the global model: its equation, and that only what is exported depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.errors import RuleError
from paceline.rules import BlockMomentum, BlockSettings, Rule
from paceline.rules.outer import Average, MovingAverage
from paceline.rules.outer.base import Coefficients
from tests.helpers import Place, State, distance, momentum_sgd, same_bits, simulate, state_of, train

F64 = torch.float64


def models(outer: MovingAverage, moves: list[float]) -> tuple[list[Tensor], list[Tensor]]:
    """The global model and the average after each block, whose mean displacements are `moves`."""
    anchor, state = torch.zeros(1, dtype=F64), {name: torch.zeros(1, dtype=F64) for name in outer.tensors}
    found, averages, ahead = [], [], 0.0
    for block, move in enumerate(moves, 1):
        eta = outer.momentum_at(block, 4)
        c = Coefficients(eta, outer.lr_at(block, 4), ahead, outer.momentum_at(block + 1, 4), block=block)
        outer.step(anchor, torch.tensor([move], dtype=F64), state, c, torch.empty_like(anchor))
        found.append(anchor.clone())
        averages.append(state["ema"].clone())
        ahead = c.next_momentum
    return found, averages


def test_three_blocks_by_hand() -> None:
    """b = 1/2, models 1, 2, 4: the weights are 1; 1/3, 2/3; 1/7, 2/7, 4/7."""
    found, averages = models(MovingAverage(Average(), 0.5), [1.0, 1.0, 2.0])
    assert [float(one) for one in found] == [1.0, 2.0, 4.0]
    assert [float(one) for one in averages] == pytest.approx([1.0, 5 / 3, (1 + 4 + 16) / 7])


@pytest.mark.parametrize("decay", [0.3, 0.9, 0.99])
def test_it_is_the_weighted_mean_of_all_models(decay: float) -> None:
    moves = torch.randn(40, generator=torch.Generator().manual_seed(2), dtype=F64).tolist()
    found, averages = models(MovingAverage(BlockMomentum(0.7, 0.8), decay), moves)
    for n, average in enumerate(averages, 1):
        weights = [decay ** (n - k) for k in range(1, n + 1)]
        mean = sum(w * float(theta) for w, theta in zip(weights, found, strict=False)) / sum(weights)
        assert float(average) == pytest.approx(mean, rel=1e-12, abs=1e-12)


def watched(rule: str, **choices: Any) -> tuple[list[State], list[State], list[float], State]:
    """What worker 0 holds and what it would export after each step, its losses, and the end."""

    def after(place: Place) -> None:
        with place.run.global_model() as whole:
            evaluated = state_of(whole)
        exported = place.run.global_state()
        assert same_bits(evaluated, exported)
        assert same_bits(state_of(place.run.model_for_export()), exported)
        place.extra.setdefault("held", []).append(state_of(place.model))
        place.extra.setdefault("exported", []).append(exported)

    out = train(rule, 3, optimizer=momentum_sgd, after_step=after, **choices)[0]
    return out.extra["held"], out.extra["exported"], out.losses, out.model


@pytest.mark.parametrize("more", ["", ", overlap=1, fragments=2", ", warmup=3", ", nesterov=False"])
def test_training_is_that_without_an_average_bit_for_bit(more: str) -> None:
    held, exported, losses, end = watched(f"bmuf(period=2{more})", samples=96)
    held_with, exported_with, losses_with, end_with = watched(f"bmuf(period=2, ema=0.6{more})", samples=96)
    assert losses == losses_with
    assert all(same_bits(one, other) for one, other in zip(held, held_with, strict=True))
    assert distance(exported[-1], exported_with[-1]) > 1e-3
    assert distance(end, end_with) > 1e-3


def test_workers_of_another_number_keep_the_average(tmp_path: Path) -> None:
    """They train on from the global model, not from the average."""
    rule = "averaging(period=3, ema=0.8)"

    def program(resume: bool) -> Any:
        model = nn.Linear(1, 1, bias=False)
        run = paceline.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), rule)
        with torch.no_grad():
            model.weight.zero_()
        assert run._state.blocks is not None
        run._state.blocks.capture()
        if resume:
            run.resume(tmp_path / "c")
            return model.weight.item(), run.global_state()["weight"].item()
        for _ in range(6):
            model.weight.grad = torch.full_like(model.weight, -1.0)
            run._context.owned[0][0].step()
        run.save(tmp_path / "c")
        run.abandon()
        return None

    simulate(lambda: program(False), 3)
    for start, average in simulate(lambda: program(True), 2):
        assert start == 6.0
        assert average == pytest.approx((0.8 * 3 + 6) / 1.8)


@pytest.mark.parametrize("decay", [1, -0.1, "0.9", True, None])
def test_a_bad_decay(decay: Any) -> None:
    with pytest.raises(RuleError, match="ema must be a number from 0"):
        paceline.RECIPES["bmuf"].build(ema=decay)


def test_only_rules_of_blocks_have_it() -> None:
    with pytest.raises(RuleError, match="EveryStep has none; use ema=0"):
        Rule(paceline.rules.EveryStep(), paceline.rules.Gradient(), settings=BlockSettings(ema=0.9))
    with pytest.raises(RuleError, match="sync has no setting 'ema'"):
        paceline.rule_from_text("sync(ema=0.9)")
