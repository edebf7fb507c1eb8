# SPDX-License-Identifier: Apache-2.0
"""Contributions that are far larger than usual: who is judged by what, and what becomes of them."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline
from paceline.communication.base import BLOCK
from paceline.update.exchange.exchanger import NO_PAYLOAD, ExchangeHeader, ExchangeSummary, with_outliers_dropped
from paceline.update.exchange.outliers import FAR, LEAST, Guard, Norms, farthest, make_guard, outliers
from tests.helpers import attached, simulate


# -- the judgement -----------------------------------------------------------------------------------------------------
def filled(guard: Guard, *rows: dict[int, float]) -> Norms:
    norms = Norms(guard)
    for row in rows:
        norms.add(row)
    return norms


def test_the_limit_by_hand() -> None:
    guard = Guard(history=3, window=8, threshold=2.0, least=2.0)
    spread = math.log(10)  # the median deviation of the logarithms of 0.1, 1, 10
    assert guard.limit([0.1, 1.0, 10.0]) == pytest.approx(math.exp(2.0 * 1.4826 * spread))
    assert guard.limit([3.0, 3.0, 3.0]) == pytest.approx(6.0)  # no spread at all: `least` times the median
    assert guard.limit([1.0, 1.0]) == math.inf


def test_nothing_is_judged_before_there_is_a_history() -> None:
    norms = filled(Guard(history=3, window=8), {0: 1.0, 1: 1.0}, {0: 1.0, 1: 1.0})
    assert norms.usual(0, 1e9) and norms.add({0: 1.0, 1: 0.5}) is None
    assert not norms.usual(0, 1e9)
    assert norms.usual(0, 9.9) and not norms.usual(0, 10.1)
    assert norms.usual(0, 1e-9)  # only what is too large is judged


def test_the_window_moves_and_begins_anew_where_the_scale_has_changed() -> None:
    norms = filled(Guard(window=3, history=2), *({0: float(k)} for k in range(1, 6)))
    assert norms.add({0: 100.0}, changed=True) == (3.0, 5.0)
    assert norms.state() == [[[0, 100.0]]]


@pytest.mark.parametrize(
    ("said", "out"),
    [
        ({0: (1.0, True), 1: (1.0, True), 2: (90.0, False)}, {2}),
        ({0: (1.0, True), 1: (90.0, False)}, {1}),  # one of two is not most
        ({0: (1.0, True), 1: (90.0, False), 2: (80.0, False)}, set()),  # two of three: the scale has changed
        ({0: (90.0, False)}, set()),
        ({0: (30.0, True), 1: (31.0, False), 2: (29.0, True)}, set()),  # one is over the limit, all are near it
        ({0: (1.0, True), 1: (1.0, True), 2: (70.0, False), 3: (80.0, False)}, {2, 3}),
        ({0: (0.0, True), 1: (90.0, False)}, set()),  # a worker that has not moved says nothing of the scale
        ({0: (0.0, True), 1: (1.0, True), 2: (90.0, False)}, {2}),
        ({}, set()),
    ],
)
def test_who_is_left_out(said: dict[int, tuple[float, bool]], out: set[int]) -> None:
    assert outliers(said) == out


def test_who_is_not_finite_or_brings_nothing_has_no_voice() -> None:
    ill = ExchangeHeader(1, BLOCK, True, False, False, 4, 0.0, 0.0, 4, 0)
    well = ExchangeHeader(1, BLOCK, True, False, True, 4, 1.0, 1.0, 4, 0)
    idle = ExchangeHeader(1, NO_PAYLOAD, False, False, True, 0, 0.0, 0.0, 4, 0)
    huge = ExchangeHeader(1, BLOCK, True, False, True, 4, 50.0, 1.0, 4, 0, usual=False)
    summary = with_outliers_dropped(ExchangeSummary((ill, well, idle, huge)))
    assert summary.left_out == [0, 3] and summary.weight == 1.0
    assert with_outliers_dropped(ExchangeSummary((ill, idle, huge))).left_out == [0]  # nobody to compare it with
    assert with_outliers_dropped(summary) == summary


@pytest.mark.parametrize(
    "make",
    [
        lambda: Guard(window=1),
        lambda: Guard(history=40),
        lambda: Guard(threshold=0.0),
        lambda: Guard(least=0.5),
        lambda: make_guard("norms"),
    ],
)
def test_numbers_that_make_no_sense_are_refused(make: Callable[[], object]) -> None:
    with pytest.raises(paceline.UnsupportedError, match="guard"):
        make()


# -- among workers -----------------------------------------------------------------------------------------------------

BLOCKS = ["averaging(period=1)", "averaging(period=2)", "averaging(period=4, overlap=1)", "bmuf(period=2, fragments=2)"]
GRADIENTS = ["sync", "sync(reproducible=True)", "sync(codec='int8')"]
GUARD = Guard(history=3, window=16)


class Two(nn.Module):
    """Two parameters, so that there can be two fragments."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(4, 1, bias=False) for _ in range(2))

    def push(self, speed: float) -> None:
        """Gradients that move every parameter by `speed`, as a loss would make them."""
        (-speed * sum(p.sum() for p in self.parameters())).backward()


def climb(
    rule: str, workers: int, speed: Callable[[int, int], float], steps: int = 48, log: Path | None = None
) -> list[list[float]]:
    """Every worker's parameters in the end, at 0 in the beginning; `speed(rank, step)`, steps from 1."""

    def program() -> list[float]:
        model = Two()
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        with attached(model, rule, lr=1.0, guard=GUARD, log=log, timeout_s=20) as (run, _, optimizer):
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                model.push(speed(run.world.rank, step))
                optimizer.step()
        return [float(x) for p in model.parameters() for x in p.detach().flatten()]

    return simulate(program, workers)


@pytest.mark.parametrize("rule", BLOCKS + GRADIENTS)
def test_an_outlier_is_left_out_and_named(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    def speed(rank: int, step: int) -> float:
        return 1e6 if (rank, step) == (1, 40) else 1.0

    with caplog.at_level(logging.WARNING, logger="paceline"):
        outs = climb(rule, 4, speed)
    assert outs == [outs[0]] * 4
    assert max(outs[0]) < 1000  # one step of it in the mean would be 250,000
    said = {r.getMessage() for r in caplog.records}
    assert said and all("worker 1 on" in line and "is usual" in line and "worker 0" not in line for line in said)


@pytest.mark.parametrize("rule", ["averaging(period=1)", "averaging(period=4)", "sync"])
def test_the_mean_is_that_of_the_others(rule: str) -> None:
    def speed(rank: int, step: int) -> float:
        return -1e6 if (rank, step) == (1, 40) else 1.0 + rank

    period = 4 if "4" in rule else 1
    without = 2.5 * 48 + period * ((1 + 3 + 4) / 3 - 2.5)
    assert climb(rule, 4, speed)[2] == pytest.approx([without] * 8)


@pytest.mark.parametrize("rule", BLOCKS + GRADIENTS)
def test_a_new_scale_is_taken_at_once(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """A learning rate that everybody multiplies is no outlier, and no work is lost."""
    with caplog.at_level(logging.WARNING, logger="paceline"):
        outs = climb(rule, 4, lambda rank, step: (1.0 + 0.1 * rank) * (100.0 if step > 32 else 1.0))
    assert outs == [outs[0]] * 4 and not caplog.records
    if rule.startswith(("averaging(period=1", "averaging(period=2", "sync(r")) or rule == "sync":
        assert outs[0] == pytest.approx([1.15 * (32 + 16 * 100)] * 8, rel=1e-5)


def test_a_worker_that_stays_an_outlier_is_called_broken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        climb("averaging(period=4)", 3, lambda rank, step: 1e4 if rank == 2 and step > 32 else 1.0, log=tmp_path)
    texts = Counter(r.getMessage().partition(" (norm")[0].partition(" was ")[2] for r in caplog.records)
    assert texts == {f"rejected {how}": 3 for how in ("in exchange 9", "3 times in a row", "in 4 of 13 exchanges")}
    for rank in range(3):  # in the log of every worker
        lines = [json.loads(line) for line in (tmp_path / f"rank-{rank:03d}.jsonl").read_text().splitlines()]
        told = [line for line in lines if line["kind"] == "left_out"]
        assert [line["in_a_row"] for line in told] == [1, 2, 3, 4]
        assert {(line["rank_left_out"], line["finite"]) for line in told} == {(2, True)}
        assert all("where 8 to 8" in line["why"] or "is usual" in line["why"] for line in told)


def test_without_a_guard_everything_goes_in() -> None:
    def program() -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        with attached(model, "averaging(period=1)", lr=1.0, guard=None) as (run, _, optimizer):
            for step in range(20):
                model.weight.grad = torch.full_like(model.weight, -1e6 if step == 15 and run.world.rank else -1.0)
                optimizer.step()
        return float(model.weight.detach())

    assert simulate(program, 2)[0] > 4e5


@pytest.mark.parametrize("rule", ["averaging(period=2)", "averaging(period=4, overlap=1)", "sync"])
def test_a_resumed_run_judges_by_what_it_had_seen(rule: str, tmp_path: Path) -> None:
    def program(first: bool) -> list[float]:
        torch.manual_seed(1)
        with attached(Two(), rule, lr=1.0, guard=GUARD, timeout_s=20) as (run, model, optimizer):
            if not first:
                run.resume(tmp_path / "kept")
            for step in range(run.minibatches, 32):
                optimizer.zero_grad()
                model.push(1e6 if (run.world.rank, step) == (0, 22) else 1.0 + run.world.rank)
                optimizer.step()
                if step == 20 and first:
                    run.save(tmp_path / "kept")
        return [float(x) for p in model.parameters() for x in p.detach().flatten()]

    whole, resumed = (simulate(partial(program, first), 3) for first in (True, False))
    assert whole == resumed and max(whole[0]) < 1000


def test_workers_that_hold_different_bits_are_found_by_an_unusual_one_too() -> None:
    caught = []

    def program() -> None:
        model = Two()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = paceline.attach(model, optimizer, "averaging(period=2)", guard=GUARD, timeout_s=20)
        for step in range(1, 21):
            optimizer.zero_grad()
            model.push(1e6 if (run.world.rank, step) == (1, 20) else 1.0)
            if (run.world.rank, step) == (1, 20):
                assert run._state.blocks is not None
                run._state.blocks.outer_states[0].checksum.add_(1)
            try:
                optimizer.step()
            except paceline.DesyncError:
                caught.append(run.world.rank)
        run.abandon()

    simulate(program, 3)
    assert sorted(caught) == [0, 1, 2]


def test_workers_must_have_the_same_guard() -> None:
    def program() -> None:
        model = Two()
        guard = None if paceline_rank() else GUARD
        paceline.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), "bmuf", guard=guard)

    with pytest.raises(paceline.MismatchError, match="guard"):
        simulate(program, 2)


def paceline_rank() -> int:
    from paceline.communication import virtual

    here = virtual.current()
    assert here is not None
    return here.world.rank


def test_a_rule_without_a_common_exchange_refuses_it() -> None:
    model = Two()
    with pytest.raises(paceline.UnsupportedError, match="guard away"):
        paceline.attach(model, torch.optim.SGD(model.parameters(), lr=1.0), "asgd", guard="outliers")


# -- before there is a history -----------------------------------------------------------------------------------------
def test_before_there_is_a_history_a_norm_is_compared_with_the_parameters() -> None:
    assert farthest([torch.full((3,), 2.0), torch.full((4,), 1.0)], FAR) == pytest.approx(FAR * 4.0)
    assert farthest([torch.zeros(4, 25)], FAR) == pytest.approx(FAR * LEAST * 10.0)  # all begin at 0
    assert farthest([torch.tensor([math.nan])], FAR) == math.inf
    norms = Norms(Guard(), lambda: 50.0)
    assert norms.usual(0, 49.0) and not norms.usual(0, 51.0)


@pytest.mark.parametrize("rule", ["bmuf(period=2)", "averaging(period=2)", "sync"])
@pytest.mark.parametrize("zero", [False, True], ids=["", "from zeros"])
def test_what_is_out_of_all_proportion_does_not_get_in_with_the_first_exchange(rule: str, zero: bool) -> None:
    def program(spoils: bool) -> float:
        torch.manual_seed(0)
        model = nn.Linear(4, 1)
        if zero:
            nn.init.zeros_(model.weight)
            nn.init.zeros_(model.bias)
        with attached(model, rule, lr=0.1, guard="outliers") as (run, _, optimizer):
            for step in range(6):
                optimizer.zero_grad()
                loss = (model(torch.ones(2, 4)) - 1).square().mean()
                (loss * (1e30 if spoils and run.world.rank == 1 and step == 0 else 1.0)).backward()
                optimizer.step()
        return float(model.weight.detach().abs().max())

    assert max(simulate(lambda: program(True), 3)) < 10.0


def test_a_first_block_that_moves_all_workers_far_is_no_fault() -> None:
    """A rate that is large beside small weights: the scale of the training, and nobody is left out."""

    def program() -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(4, 1, bias=False)
        nn.init.constant_(model.weight, 1e-9)
        with attached(model, "averaging(period=1)", lr=1.0) as (run, _, optimizer):
            for _ in range(3):
                model.weight.grad = torch.full((1, 4), -1000.0 * (1 + run.world.rank))
                optimizer.step()
        return list(model.weight.detach().flatten().tolist())

    for weights in simulate(program, 2):
        assert weights == pytest.approx([4500.0] * 4)
