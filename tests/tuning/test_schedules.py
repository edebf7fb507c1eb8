# SPDX-License-Identifier: Apache-2.0
"""Schedules that need the whole cluster, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline.errors import RuleError
from paceline.tuning import Newbob
from tests.helpers import Place, adam, make_data, momentum_sgd, same_bits, train

LOSSES = [4.0, 2.0, 1.99, 1.9, 2.1, 1.0, 0.9995]
"""Relative improvements after the first: 0.5, 0.005, 0.045, 0, 0.474, 0.0005."""


def rate(place: Place) -> float:
    shown = place.run._context.tuner.tunables.show(["lr"])["lr"]
    assert isinstance(shown, float)
    return shown


@pytest.mark.parametrize("workers", [1, 2])
def test_newbob_halves_and_stops(workers: int) -> None:
    def hook(place: Place) -> None:
        newbob = place.extra.setdefault("newbob", Newbob(place.run))
        if place.step % 2 == 0 and place.step // 2 < len(LOSSES):
            loss = LOSSES[place.step // 2]
            place.extra.setdefault("done", []).append(newbob.validated(loss + (0.5 if place.rank else -0.5)))
        if place.step % 2:
            place.extra.setdefault("rate", []).append(rate(place))

    outs = train("sync", workers, samples=96 * workers, after_step=hook, epochs=1)
    for out in outs:
        # below 1 % for the first time with the third loss; below 0.1 % with the fifth, while halving is under way
        shift = -0.5 if workers == 1 else 0.0
        want = by_hand([loss + shift for loss in LOSSES])
        assert out.extra["done"] == [done for done, _ in want]
        assert out.extra["rate"][: len(LOSSES)] == pytest.approx([0.1 * 0.5**halved for _, halved in want])
    if workers == 2:
        assert by_hand(LOSSES) == [(False, 0), (False, 0), (False, 1), (False, 2), (True, 2), (True, 2), (True, 2)]


def by_hand(losses: list[float]) -> list[tuple[bool, int]]:
    """(done, times halved) after each loss."""
    best, halving, done, halved, rows = losses[0], False, False, 0, [(False, 0)]
    for loss in losses[1:]:
        improvement = max(0.0, best - loss) / best
        best = min(best, loss)
        done = done or (halving and improvement < 0.001)
        halving = halving or improvement < 0.01
        halved += halving and not done
        rows.append((done, halved))
    return rows


def test_newbob_is_part_of_a_checkpoint() -> None:
    class Alone:
        """What it needs of a run of one."""

        world = type("World", (), {"rank": 0})
        messages = type("Messages", (), {"gather": staticmethod(lambda value: [value])})

        def __init__(self) -> None:
            self.asked: list[dict[str, float]] = []

        def tune(self, **settings: float) -> None:
            self.asked.append(settings)

    first = Newbob(Alone())
    for loss in LOSSES[:3]:
        first.validated(loss)
    second = Newbob(Alone())
    second.load_state_dict(first.state_dict())
    assert not second.validated(LOSSES[3]) and second._run.asked == [{"lr_factor": 0.5}]
    assert second.validated(float("nan")) and second.best == LOSSES[3]
    with pytest.raises(RuleError, match="end must lie"):
        Newbob(Alone(), start=0.1, end=0.2)


TRIALS = [
    ("sync", momentum_sgd),
    ("one_bit(warmup=0)", momentum_sgd),
    ("averaging(period=3)", adam),
    ("bmuf_adam(period=4, overlap=3, fragments=2)", adam),
    ("streaming_diloco(period=4, overlap=2, fragments=3)", adam),
]


@pytest.mark.parametrize(("rule", "optimizer"), TRIALS, ids=[rule for rule, _ in TRIALS])
@pytest.mark.parametrize("at", [0, 4])
def test_nothing_is_left_of_trials(rule: str, optimizer: Any, at: int) -> None:
    def hook(place: Place) -> None:
        if place.step != at:
            return
        before = place.run.snapshot()
        for begin in range(0, 48, 8):
            place.optimizer.zero_grad()
            x, y = (part[begin : begin + 8] for part in make_data(48, seed=3).tensors)
            nn.functional.cross_entropy(place.model(x), y).backward()
            place.optimizer.step()
        torch.randn(1)
        place.run.restore(before)

    outs = train(rule, 2, optimizer=optimizer, samples=96, after_step=hook)
    want = train(rule, 2, optimizer=optimizer, samples=96)
    for out, plain in zip(outs, want, strict=True):
        assert same_bits(out.model, plain.model) and same_bits(out.exported, plain.exported)
