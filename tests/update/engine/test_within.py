# SPDX-License-Identifier: Apache-2.0
"""A worker that is a host: synchronous steps among the processes of a host, blocks between hosts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import RuleError
from tests.helpers import (
    Outcome,
    Place,
    Program,
    adam,
    attached,
    descend,
    distance,
    momentum_sgd,
    rank,
    same_bits,
    sgd,
    state_of,
)

RULES: list[tuple[str, Callable[[Any], torch.optim.Optimizer]]] = [
    ("bmuf(period=3, within='host')", momentum_sgd),
    ("averaging(period=3, warmup=4, within='host')", momentum_sgd),
    ("bmuf(period=4, fragments=2, overlap=2, within='host', codec='int8')", momentum_sgd),
    ("bmuf_adam(period=3, within='host')", adam),
]


def train(rule: Any, hosts: str, **choices: Any) -> list[Outcome]:
    torch.manual_seed(5)
    return list(paceline.simulate(Program(rule, **choices), len(hosts), hosts=list(hosts)))  # type: ignore[arg-type]


@pytest.mark.parametrize("hosts", ["aabb", "abab", "aab", "aabc"])
@pytest.mark.parametrize(("rule", "optimizer"), RULES, ids=[rule for rule, _ in RULES])
def test_all_end_with_one_model(rule: str, optimizer: Any, hosts: str) -> None:
    outs = train(rule, hosts, optimizer=optimizer, samples=97, norm=True)
    assert all(same_bits(out.model, outs[0].model) for out in outs)
    assert same_bits(outs[0].model, outs[0].exported)


@pytest.mark.parametrize(("rule", "optimizer"), RULES, ids=[rule for rule, _ in RULES])
def test_one_host_alone_is_synchronous(rule: str, optimizer: Any) -> None:
    within = train(rule, "aaa", optimizer=optimizer, samples=70)
    assert same_bits(within[0].model, train("sync", "aaa", optimizer=optimizer, samples=70)[0].model)


def test_one_process_a_host_is_the_plain_rule() -> None:
    within = train("bmuf(period=3, within='host')", "abc", optimizer=momentum_sgd)
    plain = train("bmuf(period=3)", "abc", optimizer=momentum_sgd)
    assert distance(within[0].model, plain[0].model) < 1e-6


def test_blocks_of_one_step_and_plain_sgd_are_synchronous() -> None:
    """The mean over hosts of what each host's mean gradient did is what the mean gradient of all does."""
    within = train("averaging(period=1, within='host')", "aabb", optimizer=sgd)
    assert distance(within[0].model, train("sync", "aabb", optimizer=sgd)[0].model) < 1e-6


def test_mates_are_alike_after_every_step_and_hosts_after_a_block() -> None:
    def after(place: Place) -> None:
        place.extra.setdefault("models", []).append(state_of(place.model))

    outs = train("bmuf(period=3, within='host')", "aabb", optimizer=momentum_sgd, after_step=after)
    for step, (one, mate, other) in enumerate(zip(*(outs[r].extra["models"] for r in (0, 1, 2)), strict=True), 1):
        assert same_bits(one, mate)
        assert same_bits(one, other) == (step % 3 == 0)


def test_the_gain_follows_the_hosts() -> None:
    """BMUF with the paper's numbers: eta = 1 - 1/N, N hosts and not processes."""

    def program() -> float:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        with paceline.attach(model, optimizer, "bmuf(period=1, gain='paper', within='host', nesterov=False)"):
            for _ in range(2):  # d = 1 in each block: Delta = 1, then eta + 1
                optimizer.zero_grad()
                (-model.weight.sum()).backward()
                optimizer.step()
        return float(model.weight.detach())

    assert paceline.simulate(program, 4, hosts=list("aabb")) == [pytest.approx(1 + 1.5)] * 4


@pytest.mark.parametrize("steps", [(3, 9, 0, 5), (0, 0, 4, 7), (6, 6, 6, 1)])
def test_uneven_data_ends_with_one_model(steps: tuple[int, ...]) -> None:
    def program() -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        with attached(nn.Linear(3, 2), "bmuf(period=3, within='host')", momentum_sgd) as (_, model, optimizer):
            torch.manual_seed(rank())
            for _ in range(steps[rank()]):
                descend(model, optimizer, torch.randn(4, 3))
        return state_of(model)

    outs = paceline.simulate(program, 4, hosts=list("aabb"))
    assert all(same_bits(out, outs[0]) for out in outs)  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [4, 6, 7])
def test_stop_and_resume(at: int, tmp_path: Any) -> None:
    choices = {"optimizer": momentum_sgd, "epochs": 3, "norm": True, "dropout": 0.2}
    rule = "bmuf(period=3, overlap=2, within='host', warmup=2)"
    whole = train(rule, "aabb", **choices)
    train(rule, "aabb", save_at=at, save_to=tmp_path / "c", stop_at=at, **choices)
    again = train(rule, "aabb", resume=tmp_path / "c", **choices)
    assert all(same_bits(one.model, two.model) for one, two in zip(whole, again, strict=True))


def test_what_it_is_not_for() -> None:
    with pytest.raises(RuleError, match=r"within must be .*got 'rack'"):
        paceline.rule_from_text("bmuf(within='rack')")
    with pytest.raises(RuleError, match="no setting 'within'"):
        paceline.rule_from_text("sync(within='host')")
