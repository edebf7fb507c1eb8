# SPDX-License-Identifier: Apache-2.0
"""Stacked workers under a bound: what they do is what stacked workers with those settings do; a curve made by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UnsupportedError
from paceline.tuning import loss_bound
from paceline_plugins.forecast import WithinResult, simulate_stacked, simulate_within
from paceline_plugins.forecast.vectorised import within as of_branches

WORKERS, STEPS = 2, 320


def minibatches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return list(torch.randn(WORKERS * STEPS, 4, 3, generator=generator))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch.sum(1, keepdim=True)).square().mean()


def start() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.01)


def go(rule: str, lift: dict[int, float] | None = None, **settings: Any) -> WithinResult:
    """With `lift`, each held-out loss is a power law, higher while the period is one of these."""
    model, optimizer = start()
    period = [4]
    numbers = count(1)

    def made_up(parameters: dict[str, Tensor]) -> float:
        return 5.0 * next(numbers) ** -0.2 * (1 + (lift or {}).get(period[0], 0.0))

    class Watched(loss_bound.LossBound):
        def look(self, now: loss_bound.Place, rows: Any) -> tuple[int, str] | None:
            found = super().look(now, rows)
            period[0] = now.period if found is None else found[0]
            return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_branches, "LossBound", Watched)
        patch.setattr(loss_bound, "SETTLE", 2)
        chosen = {"target": 8, "every": 16, **settings}
        return simulate_within(model, loss_of, optimizer, rule, minibatches(), WORKERS, made_up, **chosen)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def test_with_nothing_to_change_it_is_the_stacked_simulation() -> None:
    def steps() -> Iterator[Tensor]:
        yield from torch.stack(minibatches()).view(STEPS, WORKERS, 4, 3)

    found, plain = (
        go("auto(within=1%)", target=4),
        simulate_stacked(*_of(start()), "bmuf(period=4, ema=0.97, rate_exponent=0.29)", steps()),
    )
    assert same(found.parameters, plain.parameters)
    assert (found.settings, found.steps, found.exchanges, found.extra) == (((0, 4, 2),), STEPS, STEPS // 4, 0)


def _of(made: tuple[nn.Module, torch.optim.Optimizer]) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    return made[0], loss_of, made[1]


def test_the_curve_decides_as_in_a_run() -> None:
    free, dear = go("auto(within=1%)"), go("auto(within=1%)", {8: 0.05})
    assert [period for _, period, _ in free.settings] == [4, 8]
    assert [period for _, period, _ in dear.settings][:3] == [4, 8, 4]
    assert "is withdrawn: the held-out loss is 4.9 % (+- 0 %)" in dear.told[1]
    assert free.steps == STEPS and free.exchanges < dear.exchanges < STEPS // 4


def test_workers_join_one_step_at_a_time() -> None:
    model, optimizer = start()
    numbers = count(1)
    rule = "auto(within=1%, grow='auto(threshold=0.01, blocks=1)', longest=4)"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss_bound, "SETTLE", 1)
        found = simulate_within(
            model,
            loss_of,
            optimizer,
            rule,
            minibatches(),
            4,
            lambda _: 5.0 * next(numbers) ** -0.2,
            target=4,
            every=16,
        )
    assert [workers for *_, workers in found.settings] == [2, 4] and found.settings[1][0] > 100
    assert any("workers 2 -> 4 is kept" in text for text in found.told)


def test_branches_from_one_state_have_the_same_samples() -> None:
    """The longer period is kept only if the held-out loss says so, and either way no minibatch is left out."""
    model, optimizer = start()
    held_out = torch.randn(256, 3, generator=torch.Generator().manual_seed(4))

    def judge(parameters: dict[str, Tensor]) -> float:
        return float(torch.func.functional_call(_Judged(), {f"net.{k}": v for k, v in parameters.items()}, (held_out,)))

    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(of_branches, "SETTLE", 4)
        for bound in ("50%", "0.0001%"):
            model, optimizer = start()
            settings: dict[str, Any] = {"target": 8, "every": 8, "paired": True}
            found[bound] = simulate_within(
                model, loss_of, optimizer, f"auto(within={bound})", minibatches(), WORKERS, judge, **settings
            )
    kept, strict = found["50%"], found["0.0001%"]
    assert [period for _, period, _ in kept.settings] == [4, 8] and kept.extra == 128
    assert [period for _, period, _ in strict.settings] == [4] and strict.extra >= 128
    assert kept.steps == strict.steps == STEPS and math.isfinite(kept.spent)
    model, optimizer = start()
    plain = simulate_stacked(
        model,
        loss_of,
        optimizer,
        "bmuf(period=4, ema=0.97, rate_exponent=0.29)",
        torch.stack(minibatches()).view(STEPS, WORKERS, 4, 3),
    )
    assert same(strict.parameters, plain.parameters)


class _Judged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, batch: Tensor) -> Tensor:
        return loss_of(self.net, batch)


@pytest.mark.parametrize(
    ("rule", "settings", "why"),
    [
        ("auto", {}, "has no bound"),
        ("auto(within=1%, grow='auto')", {"paired": True}, "a fixed number of workers"),
        ("auto(within=1%, overlap=2)", {}, "cannot be simulated stacked"),
        ("auto(within=50%)", {"paired": True, "every": 100}, "held-out losses in its second half"),
    ],
)
def test_what_it_cannot_do_is_refused(rule: str, settings: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        go(rule, **settings)
