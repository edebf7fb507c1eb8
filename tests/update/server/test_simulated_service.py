# SPDX-License-Identifier: Apache-2.0
"""Virtual workers and owners on a simulated clock: who pushes when, worked out by hand, and what goes over the wire."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import paceline
from paceline.communication.base import WORDS
from paceline.forecast.sim import Clock, exponential, link
from paceline.rules.outer import Sum
from paceline.rules.schedule import Bounded
from paceline.rules.topology import Sharded
from paceline.rules.traffic import FRAME_BYTES, bytes_per_block, overhead_bytes
from paceline.update.monitor import Monitor
from paceline.update.server.shard import AddDelta, IncomingPush, ParameterShard, WorkerClocks
from tests.helpers import attached, make_net, momentum_sgd, rank
from tests.update.server.programs import Numbers, simulate, uneven


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[int]]:
    """What each worker was told of its pushes, in order."""
    found: dict[int, list[int]] = defaultdict(list)
    monkeypatch.setattr(Monitor, "pushed", lambda self, delay: found[rank()].append(delay))
    return found


def steps(rule: str, counts: list[int], after: Callable[[Any, Numbers], None] | None = None) -> float:
    """Worker r makes counts[r] steps of +1 on one number."""
    with attached(Numbers(), rule, lr=1.0) as (run, model, optimizer):
        for _ in range(counts[rank()]):
            model.p.grad = torch.full((1,), -1.0)
            optimizer.step()
            if after is not None:
                after(run, model)
    return model.value


# -- by hand -----------------------------------------------------------------------------------------------------------
def test_delays_by_hand_where_workers_wait_for_the_answer(delays: dict[int, list[int]]) -> None:
    """Workers 0 and 1 push at 1, 2, 3, ..., in this order, and worker 2 at 3.5 and 7, there after the others."""
    found = simulate(partial(steps, "asgd(overlap=0)", [8, 8, 2]), 3, Clock([1.0, 1.0, 3.5]))
    #            t = 1  2  3  4  5  6  7  8
    assert delays == {0: [0, 1, 1, 2, 1, 1, 1, 2], 1: [1, 1, 1, 2, 1, 1, 1, 2], 2: [6, 8]}
    assert found == [18.0] * 3


def test_delays_by_hand_where_the_answer_has_the_next_minibatchs_time(delays: dict[int, list[int]]) -> None:
    """A push is computed at the values that had come when the minibatch before ended.

    In order of time, versions after: worker 0 makes 1, 3, 5, 8, 10, 12, 14, 17; worker 1 makes 2, 4, 6, 9, 11, 13, 15,
    18; worker 2 makes 7 and 16. The first values are asked for at 1, the others 0.8 s after a push: at 2.8 (version 4),
    3.8 (7), 4.8 (9), 5.8 (11), 6.8 (13) and 7.8 (16). The fourth push of worker 0 finds version 7, and was computed
    at what came at 2.8.
    """
    simulate(partial(steps, "asgd", [8, 8, 2]), 3, Clock([1.0, 1.0, 3.5]))
    zero = [0, 2 - 0, 4 - 1, 7 - 4, 9 - 7, 11 - 9, 13 - 11, 16 - 13]
    one = [1, 3 - 0, 5 - 2, 8 - 4, 10 - 7, 12 - 9, 14 - 11, 17 - 13]
    assert delays == {0: zero, 1: one, 2: [6, 15]}


def test_latency_adds_to_the_delay_of_whoever_is_far_from_the_owner(delays: dict[int, list[int]]) -> None:
    """One number, owned by worker 1, which pushes every second. Worker 0's pushes take 0.625 s, their answers too: they
    arrive at 1.625, 3.875 and 6.125."""
    simulate(partial(steps, "asgd(overlap=0)", [3, 6]), 2, Clock(1.0, link(0.625)))
    assert delays[1] == [0, 1, 0, 1, 0, 0]
    assert delays[0] == [1, 2, 3]


def test_a_slow_link_carries_fewer_and_fuller_pushes() -> None:
    """Answers that take 3.5 minibatches: the gradients meanwhile go as their mean in one push."""
    blocks: dict[int, int] = {}

    def after(run: Any, model: Numbers) -> None:
        blocks[rank()] = run.blocks

    found = simulate(partial(steps, "asgd(hold=16)", [13, 13], after), 2, Clock(1.0, link(1.75)))
    assert blocks == {0: 4, 1: 13}, "worker 0 pushes after 1, 5, 9 and 13 minibatches"
    assert found == [13.0 + 4.0] * 2, "a mean is one step"


@pytest.mark.parametrize("bad", [2, 3, 5])
def test_a_minibatch_with_nan_does_not_take_those_along_that_were_gathered_with_it(bad: int) -> None:
    """Worker 0 pushes the mean of minibatches 2 to 5, whose gradients are -2, -3, -4 and -5; one of them is nan."""

    def program() -> float:
        with attached(Numbers(), "asgd(hold=16)", lr=1.0) as (_, model, optimizer):
            for number in range(1, 9 if rank() == 0 else 1):
                model.p.grad = torch.full((1,), float("nan") if number == bad else -float(number))
                optimizer.step()
        return model.value

    rest = [number for number in (2, 3, 4, 5) if number != bad]
    found = simulate(program, 2, Clock(1.0, link(1.75)))
    assert found == [pytest.approx(1.0 + sum(rest) / 3 + (6 + 7 + 8) / 3)] * 2


def test_work_is_gathered_so_long_and_no_longer() -> None:
    """An answer that takes 100 s: after 16 minibatches (`hold`) the worker waits for it."""
    clock, seen = Clock(1.0, link(50.0)), list[tuple[int, float]]()

    def after(run: Any, model: Numbers) -> None:
        if rank() == 0:
            seen.append((run.blocks, clock.now))

    simulate(partial(steps, "asgd(hold=16)", [34, 0], after), 2, clock)
    assert [at for _, at in seen[:17]] == [float(n) for n in [*range(1, 17), 101]]
    assert [number for number, _ in seen[:18]] == [1] * 16 + [2] * 2
    assert seen[17][1] == 102.0


def test_bounded_staleness_by_hand(delays: dict[int, list[int]]) -> None:
    """Worker 0 takes 1 s, worker 1 takes 4 s, staleness 2: worker 0 starts its fourth step when worker 1 has pushed."""
    clock, when = Clock([1.0, 4.0]), defaultdict[int, list[float]](list)

    def after(run: Any, model: Numbers) -> None:
        when[rank()].append(clock.now)

    simulate(partial(steps, "ssp(staleness=2)", [6, 4], after), 2, clock)
    # steps end at 1, 2, 3; the answer to the third waits until 4, the next step's (done at 5) until 8, then until 12
    assert when[0] == [1.0, 2.0, 4.0, 8.0, 12.0, 16.0]
    assert when[1] == [4.0, 8.0, 12.0, 16.0]
    assert delays[0] == [0, 0, 0, 0, 0, 0]
    assert delays[1] == [3, 1, 1, 1]


# -- the seed ----------------------------------------------------------------------------------------------------------
def test_exponential_computing_times_give_geometric_delays() -> None:
    """N workers, each as likely to push next as any other: P(delay = k) = q (1 - q)^k, q = 1/N."""
    workers, pushes = 5, 12_000
    clock = Clock(exponential(), seed=2)
    shard = ParameterShard(
        0, torch.zeros(1), lambda anchor: AddDelta(Sum()), WorkerClocks(Bounded(), range(workers)), False
    )
    found: Counter[int] = Counter()
    count = [0] * workers

    def push(worker: int, version: int) -> None:
        found[shard.push(torch.ones(1), IncomingPush(worker, 0, version, 1))] += 1
        begin(worker)

    def begin(worker: int) -> None:
        version = shard.pull(worker, torch.empty(1))
        seconds = clock.compute_s(worker, count[worker])
        count[worker] += 1
        clock.wake(worker, seconds, lambda: push(worker, version))

    for worker in range(workers):
        begin(worker)
    while sum(found.values()) < pushes:
        clock.step()
    q, chi = 1 / workers, 0.0
    for k in range(16):
        want = pushes * q * (1 - q) ** k
        chi += (found[k] - want) ** 2 / want
    assert chi < 32.0, "the 99th percentile of chi-square with 16 degrees of freedom"
    assert sum(k * n for k, n in found.items()) / pushes == pytest.approx(workers - 1, rel=0.02)


# -- bytes -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["asgd()", "asgd(piece=64)", "asgd(period=3)", "ssp(staleness=3)", "easgd(period=3)"])
def test_counted_bytes(rule: str) -> None:
    """Each push and its answer as in the formulas. Besides: the start, and at the end a word to every other owner and a
    bare pull of everything (a frame for each shard of another owner, answered with its values), and then a byte to each
    other worker, at which all part."""
    workers, made = 3, 12

    def program() -> list[int]:
        with attached(make_net(), rule, momentum_sgd) as (run, model, optimizer):
            sent = [run.bytes_sent]
            for _ in range(made):
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
        return [*sent, run.bytes_sent, run.blocks]

    built = paceline.rule_from_text(rule)
    numel = sum(p.numel() for p in make_net().parameters())
    assert isinstance(built.topology, Sharded)
    for who, (start, end, blocks) in enumerate(simulate(program, workers, uneven())):
        assert blocks == made // built.schedule.period
        each = bytes_per_block(built, workers, numel, rank=who) + overhead_bytes(built, workers, numel, rank=who)
        goodbye = (workers - 1) * (FRAME_BYTES + 8 * WORDS)
        cuts = built.topology.pieces(numel, workers)
        asked = FRAME_BYTES * sum(cut.owner != who for cut in cuts)
        answered = (workers - 1) * sum(FRAME_BYTES + 4 * cut.numel for cut in cuts if cut.owner == who)
        assert end - start == blocks * each + goodbye + asked + answered


# -- failures ----------------------------------------------------------------------------------------------------------
def test_workers_that_wait_for_each_other_for_ever_are_told() -> None:
    """Worker 0 waits for a message, worker 1 may not go on without it: seen at once."""

    def after(run: Any, model: Numbers) -> None:
        if rank() == 0 and run.minibatches == 2:
            run.messages.receive(torch.zeros(1), source=1).wait()

    with pytest.raises(
        paceline.PeerLostError, match=r"no worker can continue: worker 0 waits at receive .* worker 1 waits at"
    ):
        simulate(partial(steps, "ssp(staleness=1)", [9, 9], after), 2, uneven())
