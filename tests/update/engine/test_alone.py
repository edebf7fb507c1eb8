# SPDX-License-Identifier: Apache-2.0
"""One worker whose blocks end with the outer step: Lookahead, and Nesterov momentum on its own displacement."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import RuleError
from paceline.rules import BlockSettings, EveryStep, Gradient, Rule
from tests.helpers import CLASSES, FEATURES, Place, adam, make_net, momentum_sgd, same_bits, simulate, state_of, train

STEPS, PERIOD = 14, 4
State = dict[str, torch.Tensor]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(step))
    return x, x[:, :CLASSES].argmax(1)


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


def attached(rule: str, steps: int = STEPS, each: Callable[[int, Any], None] = lambda step, run: None) -> State:
    """One worker under a rule, in this process."""
    model = make_net()
    optimizer = momentum_sgd(model.parameters())
    with paceline.attach(model, optimizer, rule) as run:
        for step in range(steps):
            learn(model, optimizer, step)
            each(step + 1, run)
    assert run.bytes_sent == 0
    return state_of(model)


def by_hand(outer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> State:
    """The fast weights make blocks of `PERIOD` steps, the last one 2; an optimizer of torch moves the slow ones."""
    model = make_net()
    slow = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    fast, slowly = momentum_sgd(model.parameters()), outer(slow)
    for step in range(STEPS):
        learn(model, fast, step)
        if (step + 1) % PERIOD == 0 or step + 1 == STEPS:
            with torch.no_grad():
                for q, p in zip(slow, model.parameters(), strict=True):
                    q.grad = q - p
            slowly.step()
            with torch.no_grad():
                for q, p in zip(slow, model.parameters(), strict=True):
                    p.copy_(q)
    return state_of(model)


def assert_close(one: State, other: State) -> None:
    for name, value in one.items():
        torch.testing.assert_close(value, other[name], rtol=1e-5, atol=1e-6)


def test_without_momentum_it_is_lookahead() -> None:
    """theta <- theta + 0.5 (fast - theta), from which the fast weights go on."""
    found = attached(f"diloco(period={PERIOD}, momentum=0, lr=0.5, alone=True)")
    assert_close(found, by_hand(lambda slow: torch.optim.SGD(slow, lr=0.5)))


def test_with_momentum_it_is_nesterov_on_the_displacement() -> None:
    found = attached(f"diloco(period={PERIOD}, momentum=0.6, lr=0.8, alone=True)")
    assert_close(found, by_hand(lambda slow: torch.optim.SGD(slow, lr=0.8, momentum=0.6, nesterov=True)))


@pytest.mark.parametrize("more", ["", ", overlap=1, fragments=2"])
def test_the_mean_of_one_worker_is_its_own_model(more: str) -> None:
    found = attached(f"averaging(period={PERIOD}, local_state='keep', alone=True{more})")
    assert_close(found, attached("averaging"))


def test_a_warm_up_is_the_program() -> None:
    found = attached(f"diloco(period={PERIOD}, alone=True, warmup={STEPS})")
    assert same_bits(found, attached("diloco"))


RULES = ["diloco(period=4, alone=True)", "bmuf_adam(period=4, overlap=2, fragments=2, alone=True)"]


@pytest.mark.parametrize(("old", "new"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("rule", RULES)
def test_another_number_takes_over_the_outer_state(rule: str, old: int, new: int, tmp_path: Path) -> None:
    def outer(place: Place) -> None:
        blocks = place.run._state.blocks
        assert blocks is not None
        place.extra.setdefault("outer", blocks.updates[0].state.parameters[0].anchor.clone())
        place.extra.setdefault("blocks", place.run.blocks)

    train(rule, old, optimizer=adam, samples=96, save_at=7, save_to=tmp_path / "c", stop_at=7)
    after = train(rule, new, optimizer=adam, samples=96, resume=tmp_path / "c", after_step=outer)
    assert all(same_bits(one.model, after[0].model) for one in after)
    assert after[0].extra["blocks"] >= 1


def test_a_change_of_the_period_takes_effect_at_once() -> None:
    seen = []

    def change(step: int, run: paceline.Run) -> None:
        if step == 5:
            assert run.tune(period=2).applied
        seen.append(run.blocks)

    attached("diloco(period=4, alone=True)", 10, change)
    assert seen == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4]


def test_processes_of_one_host_are_one_worker() -> None:
    """within="host": both make synchronous steps, and the block of the host ends with the outer step."""

    def program(rule: str) -> State:
        model = make_net()
        optimizer = momentum_sgd(model.parameters())
        with paceline.attach(model, optimizer, rule) as run:
            for step in range(STEPS):
                learn(model, optimizer, step)  # both on the same minibatch, which is that of one worker
        assert run.blocks == 4
        return state_of(model)

    rule = f"diloco(period={PERIOD}, momentum=0.6, lr=0.8, alone=True, within='host')"
    for found in simulate(lambda: program(rule), 2):
        assert_close(found, attached(rule.replace(", within='host'", "")))


def test_where_there_are_no_blocks() -> None:
    with pytest.raises(RuleError, match="sync has no setting 'alone'"):
        paceline.rule_from_text("sync(alone=True)")
    with pytest.raises(RuleError, match="alone must be False, or True for rules that exchange blocks together"):
        Rule(EveryStep(), Gradient(), settings=BlockSettings(alone=True))
    with pytest.raises(RuleError, match="alone must be True or False, got 1"):
        paceline.rule_from_text("bmuf(alone=1)")
    assert "alone" not in Rule().text() and Rule(settings=BlockSettings(alone=True)).text().endswith(", alone=True)")
