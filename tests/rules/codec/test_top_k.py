# SPDX-License-Identifier: Apache-2.0
"""Deep gradient compression against a dense one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import RuleError
from paceline.rules.codec import Layout, State, TopK
from tests.rules.codec.lockstep import exchange


class DenseDgc:
    """One worker of the publication, with a mask instead of indices."""

    def __init__(self, numel: int, ratio: float, momentum: float, nesterov: bool) -> None:
        self.k, self.m, self.nesterov = -(-int(1000 * ratio) * numel // 1000), momentum, nesterov
        self.u, self.v = torch.zeros(numel, dtype=torch.float64), torch.zeros(numel, dtype=torch.float64)

    def sent(self, g: Tensor) -> Tensor:
        if self.nesterov:
            self.u = self.m * (self.u + g)
            self.v = self.v + self.u + g
        else:
            self.u = self.m * self.u + g
            self.v = self.v + self.u
        mask = torch.zeros_like(self.v)
        mask[self.v.abs().argsort(descending=True, stable=True)[: self.k]] = 1
        sent = (self.v * mask).float().double()
        self.v, self.u = (self.v - sent), self.u * (1 - mask)
        return sent


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("ratio", [0.01, 0.2])
def test_six_exchanges_against_a_dense_reference(ratio: float, momentum: float, nesterov: bool) -> None:
    if nesterov and not momentum:
        with pytest.raises(RuleError, match="nesterov needs a momentum above 0"):
            TopK(nesterov=True)
        return
    layout, workers = Layout.of([(30, 10), (13,)]), 3
    codec = TopK(ratio=ratio, momentum=momentum, nesterov=nesterov)
    reference = [DenseDgc(layout.numel, ratio, momentum, nesterov) for _ in range(workers)]
    states: list[State] = [{} for _ in range(workers)]
    for _ in range(6):
        xs = [torch.randn(layout.numel, dtype=torch.float64) for _ in range(workers)]
        outcome = exchange(codec, xs, layout, states)
        states = outcome.states
        expected = sum(worker.sent(x) for worker, x in zip(reference, xs, strict=True))
        torch.testing.assert_close(outcome.totals[2], expected, rtol=1e-12, atol=1e-12)
        for worker, state in zip(reference, states, strict=True):
            torch.testing.assert_close(state["residual"], worker.v, rtol=1e-12, atol=1e-12)
            if momentum:
                torch.testing.assert_close(state["u"], worker.u, rtol=1e-12, atol=1e-12)


def test_by_hand() -> None:
    layout, codec = Layout.vector(4), TopK(ratio=0.5, momentum=0.5)
    first = exchange(codec, [torch.tensor([1.0, -3.0, 2.0, -1.0])], layout)
    assert first.totals[0].tolist() == [0.0, -3.0, 2.0, 0.0]
    assert first.states[0]["residual"].tolist() == [1.0, 0.0, 0.0, -1.0]
    assert first.states[0]["u"].tolist() == [1.0, 0.0, 0.0, -1.0]
    second = exchange(codec, [torch.zeros(4)], layout, first.states)
    assert second.totals[0].tolist() == [1.5, 0.0, 0.0, -1.5]
    assert not second.states[0]["u"].any() and not second.states[0]["residual"].any()


def test_of_equal_magnitudes_the_first_are_sent() -> None:
    outcome = exchange(TopK(ratio=0.5), [torch.tensor([1.0, -2.0, 1.0, -1.0, 2.0, 1.0])], Layout.vector(6))
    assert outcome.totals[0].tolist() == [1.0, -2.0, 0.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ratio": 0}, "ratio must be above 0 and at most 1, got 0"),
        ({"ratio": 1.1}, "ratio must be above 0 and at most 1, got 1.1"),
        ({"ratio": float("nan")}, "ratio must be above 0 and at most 1, got nan"),
        ({"momentum": 1.0}, "momentum must be a number from 0 to below 1, got 1.0"),
        ({"momentum": 0.9, "feedback": False}, "needs feedback"),
        ({"nesterov": 1}, "nesterov must be True or False, got 1"),
        ({"warmup": -1}, "warmup must be a number of exchanges or pairs"),
        ({"warmup": ((0, 0.5),)}, "warmup must be a number of exchanges or pairs"),
        ({"warmup": ((5, 2.0),)}, "a ratio of warmup must be above 0 and at most 1, got 2.0"),
        ({"warmup": [(5, 0.5)]}, "warmup must be a number of exchanges or pairs"),
    ],
)
def test_senseless_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        TopK(**arguments)  # type: ignore[arg-type]
