# SPDX-License-Identifier: Apache-2.0
"""`run.merge()`: what all workers have done so far is in the global model, wherever the block is."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import paceline
from tests.helpers import State, adam, attached, descend, make_net, same_bits, sgd, simulate, state_of

RULES = [
    "averaging(period=100)",
    "bmuf(period=7)",
    "bmuf(period=6, overlap=4)",
    "bmuf(period=100, fragments=3, codec='int8')",
    "streaming_diloco(period=6, overlap=3, fragments=2)",
    "sync",
    "asgd",
    "asgd(period=4, overlap=0)",
    "easgd(period=3)",
]


def trained(rule: str, merges: Callable[[int, int], bool], steps: Callable[[int], int], merged: list[Any]) -> State:
    """A program of so many steps on each rank, that merges after those that it is told.
    `merged` receives (steps, rank, global state) after each merge, for everybody.
    """
    with attached(make_net(), rule, adam if "streaming" in rule else sgd) as (run, model, optimizer):
        rank = run.world.rank
        torch.manual_seed(rank)
        for step in range(1, steps(rank) + 1):
            descend(model, optimizer, torch.randn(4, 6))
            if merges(rank, step):
                run.merge()
                merged.append((step, rank, run.global_state()))
    return state_of(model)


def alike(states: list[State]) -> bool:
    return all(same_bits(states[0], state) for state in states[1:])


def after(*steps: int) -> Callable[[int, int], bool]:
    return lambda rank, step: step in steps


@pytest.mark.parametrize("rule", RULES)
def test_all_hold_one_global_model_after_it(rule: str) -> None:
    merged: list[Any] = []
    assert alike(simulate(partial(trained, rule, after(5, 9), lambda rank: 12, merged), 3))
    for step in (5, 9):
        states = [state for at, _, state in merged if at == step]
        assert len(states) == 3 and alike(states)


@pytest.mark.parametrize(
    ("rule", "as_if"),
    [
        ("averaging(period=100)", "averaging(period=3)"),
        ("bmuf(period=100)", "bmuf(period=3)"),
        ("diloco(period=100, local_state='reset')", "diloco(period=3, local_state='reset')"),
    ],
)
def test_it_ends_a_block_as_its_period_would(rule: str, as_if: str) -> None:
    got = simulate(partial(trained, rule, after(3, 6, 9), lambda rank: 9, []), 2)[0]
    want = simulate(partial(trained, as_if, after(), lambda rank: 9, []), 2)[0]
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor)  # weights are parts of a block, so that rounding differs


def test_what_was_asked_for_before_it_takes_effect_with_it() -> None:
    def program() -> list[float]:
        with attached(make_net(), "bmuf(period=50, overlap=20)") as (run, model, optimizer):
            rates = []
            for step in range(6):
                if step == 2 and run.world.rank == 1:
                    run.tune(lr=0.5)
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                if step == 3:
                    run.merge()
                rates.append(optimizer.param_groups[0]["lr"])
        return rates

    assert simulate(program, 2) == [[0.1, 0.1, 0.1, 0.5, 0.5, 0.5]] * 2


def test_one_worker_merges_nothing_and_a_closed_run_refuses() -> None:
    with attached(make_net(), "bmuf") as (run, model, _):
        before = state_of(model)
        run.merge()
        assert same_bits(before, state_of(model))
    with pytest.raises(paceline.ClosedError):
        run.merge()
