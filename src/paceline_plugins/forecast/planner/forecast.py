# SPDX-License-Identifier: Apache-2.0
"""The forecast: speed and bytes of a rule on N workers of a network.

    efficiency = c / t          c a minibatch alone, t a minibatch among N, both in seconds of one worker
    epoch      = M / N * t      M minibatches in a pass over the data

t is a block's time over its minibatches: computing, waiting for the slowest worker, and the exposed part of exchanges
(:mod:`.lockstep`), or for asynchronous rules the result of the simulated clock (:mod:`.forecast`). Warm-up is not
included. Efficiencies of rules compare speeds; what a model learns from a minibatch is forecast by :mod:`.quality`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.communication.virtual.clock import Clock
from paceline.errors import RuleError
from paceline.rules.choice import Measured, block_sizes, choose, chosen_rule, hidden
from paceline.rules.codec import Dense, Layout
from paceline.rules.recipes import rule_from_text
from paceline.rules.rule import Rule
from paceline.rules.schedule import Bounded, EveryBlock
from paceline.rules.traffic import bytes_per_block, overhead_bytes
from paceline.tuning.rule_chooser import LEAST_ELEMENTS
from paceline.update.engine.blocks.outer_state import cut
from paceline_plugins.forecast.planner.lockstep import BlockTime, barrier, overlapped
from paceline_plugins.forecast.planner.network import Network
from paceline_plugins.forecast.planner.stragglers import LogNormal
from paceline_plugins.forecast.planner.timing import chunked_s, exchange, operation, scattered_s
from paceline_plugins.forecast.planner.workload import Workload, dense

# Asynchronous workers on the simulated clock (:class:`paceline.communication.virtual.clock.Clock`).
#
# A worker computes a block, pushes it, and goes on: at once with overlap 1, with the answer with overlap 0. While an
# answer is under way it gathers up to `hold` blocks, then it waits. An owner answers when the schedule's bound allows
# (`Bounded.may_start`). The clock orders the events and carries the messages; step times are drawn here, many at once,
# because a generator for each would take most of the time.
#
# Every worker owns an equal shard, so a worker's push is one message of half of the bytes in the rule's formula, its
# answer is another, and as an owner a worker sends as much as it receives.
#
#     cycle >= tau c,    cycle >= 2 alpha + bytes / B with overlap,    tau c + 2 alpha + bytes / B without
#
# Source: as :mod:`paceline.rules.schedule.bounded`.

BLOCKS = 4096
"""Simulated blocks of all workers together; at least `LEAST` of each."""
LEAST = 12
DRAWN = 1024


class _Fleet:
    """N workers under one schedule."""

    def __init__(self, schedule: Bounded, steps: LogNormal, one_way_s: float, workers: int) -> None:
        self._schedule, self._workers = schedule, workers
        self._draws = _Draws(steps, schedule.period)
        self.clock = Clock(network=one_way_s)
        self.finished = [0] * workers
        self.gathered = [0] * workers
        self.asking = [False] * workers
        self.waits = [False] * workers
        self.total = 0
        self._at = {0: workers}  # clock -> workers there
        self._slowest = 0
        self._held: deque[int] = deque()

    def begin(self, rank: int) -> None:
        self.clock.wake(rank, self._draws.next(), lambda: self._computed(rank))

    def _computed(self, rank: int) -> None:
        self._at[self.finished[rank]] -= 1
        self.finished[rank] += 1
        self._at[self.finished[rank]] = self._at.get(self.finished[rank], 0) + 1
        self.total += 1
        self.gathered[rank] += 1
        if self.asking[rank]:
            self.waits[rank] = self.gathered[rank] >= self._schedule.hold
        else:
            self._push(rank)
            self.waits[rank] = not self._schedule.overlap
        if not self.waits[rank]:
            self.begin(rank)

    def _push(self, rank: int) -> None:
        self.gathered[rank], self.asking[rank] = 0, True
        owner = (rank + 1) % self._workers
        self.clock.carry(rank, owner, 0, lambda: self._arrived(rank))

    def _arrived(self, rank: int) -> None:
        self._held.append(rank)
        while not self._at.get(self._slowest):
            self._at.pop(self._slowest, None)
            self._slowest += 1
        for _ in range(len(self._held)):
            held = self._held.popleft()
            if self._schedule.may_start(self.finished[held], self._slowest):
                self.clock.carry((held + 1) % self._workers, held, 0, partial(self._answered, held))
            else:
                self._held.append(held)

    def _answered(self, rank: int) -> None:
        self.asking[rank] = False
        if not self.waits[rank]:
            return
        self.waits[rank] = False
        if self._schedule.overlap and self.gathered[rank]:
            self._push(rank)
        self.begin(rank)


class _Draws:
    """Computing times of blocks, drawn in advance, many at a time."""

    def __init__(self, steps: LogNormal, period: int) -> None:
        self._steps, self._period = steps, period
        self._generator = np.random.default_rng(period)
        self._left: list[float] = []

    def next(self) -> float:
        """Seconds of one more block."""
        if not self._left:
            drawn = self._steps.sums(self._period, (DRAWN,), self._generator)
            self._left = (drawn * (self._period * self._steps.mean_s / drawn.mean())).tolist()  # with the exact mean
        return self._left.pop()


def block_s(schedule: Bounded, steps: LogNormal, one_way_s: float, workers: int) -> float:
    """Mean seconds of a block of one worker in the steady state.

    Args:
        schedule: when workers push and for whom they wait.
        steps: the time of a minibatch.
        one_way_s: seconds of a push, and of an answer.
        workers: N, at least 2.
    """
    workers = workers if steps.variation else 2  # equal workers behave alike
    fleet = _Fleet(schedule, steps, one_way_s, workers)
    each = max(LEAST, BLOCKS // workers) if steps.variation else LEAST
    for rank in range(workers):
        fleet.begin(rank)
    began_s, began = 0.0, 0
    while fleet.total < each * workers and fleet.clock.step():
        if not began and fleet.total >= each * workers // 4:
            began_s, began = fleet.clock.now, fleet.total
    return (fleet.clock.now - began_s) * workers / (fleet.total - began)


MOST_WORKERS = 1 << 16


@dataclass(frozen=True)
class Forecast:
    """The speed of a rule on N workers."""

    rule: str  # its text
    network: str  # its name
    workers: int  # N
    period: int  # minibatches of a block
    step_s: float  # wall time of a minibatch, waiting and exchanging included
    # compute_s, wait_s, exchange_s: its parts; wait_s is for other workers, exchange_s for the network
    compute_s: float
    wait_s: float
    exchange_s: float
    step_bytes: float  # mean bytes that one worker sends a minibatch
    efficiency: float  # speed over N times that of one worker
    epoch_s: float  # a pass over the data
    epoch_bytes: float  # bytes that all workers send in an epoch

    @property
    def speed_up(self) -> float:
        """Over one worker."""
        return self.workers * self.efficiency


def forecast_json(forecast: Forecast) -> dict[str, Any]:
    """A forecast for JSON."""
    return asdict(forecast) | {"speed_up": forecast.speed_up}


@dataclass(frozen=True)
class _Pace:
    """A block and what one worker sends in it."""

    block: BlockTime
    sent_bytes: float


def forecast(rule: Rule, workload: Workload, network: Network, workers: int) -> Forecast:
    """Forecast `rule` on `workers` workers.

    Args:
        rule: any rule; its formulas give the bytes.
        workload: one worker's work.
        network: between the workers.
        workers: N, at least 1.

    Raises:
        RuleError: a number is invalid, or the rule does not allow that many workers.
    """
    if not isinstance(workers, int) or isinstance(workers, bool) or not 1 <= workers <= MOST_WORKERS:
        raise RuleError(f"workers must be a whole number from 1 to {MOST_WORKERS}, got {workers!r}")
    rule = chosen(rule, workload, network, workers)
    period = rule.schedule.period
    pace = _pace(rule, workload, network, workers)
    block, step_s = pace.block, pace.block.total_s / period
    return Forecast(
        rule=rule.text(),
        network=network.name,
        workers=workers,
        period=period,
        step_s=step_s,
        compute_s=block.compute_s / period,
        wait_s=block.wait_s / period,
        exchange_s=block.exchange_s / period,
        step_bytes=pace.sent_bytes / period,
        efficiency=workload.step_s / step_s,
        epoch_s=workload.epoch / workers * step_s,
        epoch_bytes=workload.epoch * pace.sent_bytes / period,
    )


def forecasts(
    rules: Sequence[Rule], workload: Workload, network: Network, counts: Sequence[int]
) -> list[list[Forecast]]:
    """For each rule, in order, the forecast at each number of workers.

    Rules that differ only in arithmetic (`asgd` and `adadelay`) take the same time, which is computed once.
    """
    known: dict[tuple[Any, ...], list[Forecast]] = {}
    found = []
    for rule in rules:
        payload = type(rule.payload), rule.payload.rides(workload.moments)
        key = (rule.schedule, rule.codec, rule.topology, rule.settings.within, payload)
        if key not in known:
            known[key] = [forecast(rule, workload, network, n) for n in counts]
        found.append([replace(one, rule=rule.text()) for one in known[key]])
    return found


def chosen(rule: Rule, workload: Workload, network: Network, workers: int) -> Rule:
    """The rule that forecast times choose, as measured ones do: after a probe, or the period alone."""
    probe = rule.schedule.probe
    if workers == 1 or not (rule.schedule.follows_times or probe is not None):
        return rule
    if probe is None:
        exchange_s = _pace(rule, workload, network, workers).block.exchange_s
        period, overlap = hidden(Measured(workload.step_s, exchange_s), 1.0, rule.paced, False)
        return replace(rule, schedule=replace(rule.paced, period=period, overlap=overlap))
    gradients = exchange(rule_from_text("sync"), workload.layout, workload.buffers, network, workers)
    chunks = max(1, min(rule.common.chunks, workload.layout.numel // LEAST_ELEMENTS))
    sent = partial(
        bytes_per_block,
        workers=workers,
        parameters=workload.layout,
        buffers=workload.buffers,
        moments=workload.moments,
    )
    sizes = block_sizes(rule, sent, gradients.sent_bytes)
    times = Measured(workload.step_s, gradients.total_s, math.ceil(workload.epoch / workers))
    choice = choose(times, rule.paced, sizes, chunks)
    return chosen_rule(rule, choice, probe.steps, "bmuf_adam" if workload.moments == 2 else "bmuf")


def _pace(rule: Rule, workload: Workload, network: Network, workers: int) -> _Pace:
    """Block time and bytes under any rule."""
    if workers == 1:
        return _Pace(barrier(workload.steps, rule.schedule.period, 0.0, 1), 0.0)
    if not rule.schedule.workers_meet:
        return _asynchronous_pace(rule, workload, network, workers)
    if rule.schedule.exchanges_blocks:
        return _blocks(rule, workload, network, workers)
    return _every_step(rule, workload, network, workers)


def _every_step(rule: Rule, workload: Workload, network: Network, workers: int) -> _Pace:
    """Gradients are sent during the backward pass."""
    found = exchange(rule, workload.layout, workload.buffers, network, workers)
    exposed_s = found.exposed_s(workload.backward * workload.step_s) + _processing_s(rule, workload)
    return _Pace(barrier(workload.steps, 1, exposed_s, workers), found.sent_bytes)


def _blocks(rule: Rule, workload: Workload, network: Network, workers: int) -> _Pace:
    """The whole model once a block, in fragments; synchronous steps within hosts where the rule says so."""
    schedule = rule.blocks
    parts = schedule.fragments
    layout = _part(workload.layout, parts)
    found = exchange(rule, layout, dense(workload, rule.payload.rides(workload.moments)) // parts, network, workers)
    inner_s, inner_bytes = _within(rule, workload, network, workers)
    own_s = _processing_s(rule, workload) / parts
    if schedule.overlap:
        block = overlapped(schedule, workload.steps, found.total_s + own_s, workers)
    else:
        block = _barrier_blocks(workload, schedule, found.total_s + own_s, workers)
    block = replace(block, exchange_s=block.exchange_s + schedule.period * inner_s)
    return _Pace(block, parts * found.sent_bytes + schedule.period * inner_bytes)


def _barrier_blocks(workload: Workload, schedule: EveryBlock, exposed_s: float, workers: int) -> BlockTime:
    """A block without overlap, of one or several fragments."""
    ends = [0, *(schedule.ends(e) for e in range(schedule.fragments))]
    made = [after - before for before, after in pairwise(ends)]
    parts = [barrier(workload.steps, steps, exposed_s, workers) for steps in made]
    return BlockTime(*(sum(getattr(one, name) for one in parts) for name in ("compute_s", "wait_s", "exchange_s")))


def _within(rule: Rule, workload: Workload, network: Network, workers: int) -> tuple[float, float]:
    """(seconds, bytes) of one synchronous step among the workers of a host, where the rule has such steps."""
    near = network.near(workers)
    if not rule.settings.within or near == 1:
        return 0.0, 0.0
    host = Network("host", network.within, network.within, near)
    sent = Dense().bytes_sent(workload.layout, near, 0)
    chunks = len(cut(workload.layout, rule.common.chunks, Dense()))
    whole_s = chunked_s([operation("sum", sent, host, near)], chunks)
    return max(whole_s / chunks, whole_s - (1 - 1 / chunks) * workload.backward * workload.step_s), sent


def _asynchronous_pace(rule: Rule, workload: Workload, network: Network, workers: int) -> _Pace:
    """Asynchronous workers, on the simulated clock."""
    schedule = rule.bounded
    hosts = network.hosts(workers)
    sent = bytes_per_block(rule, workers, workload.layout, workload.buffers, workload.moments, hosts=hosts)
    sent += overhead_bytes(rule, workers, workload.layout)
    link = network.farthest(workers)
    one_way_s = link.latency_s + (workers - 1) * link.message_s + scattered_s(sent / 2, network, workers)
    compute_s = schedule.period * workload.step_s
    total_s = max(compute_s, block_s(schedule, workload.steps, one_way_s, workers))  # draws may give less
    round_trip_s = 2 * one_way_s  # a worker waits for it, or for what overlap does not hide, if all are equally fast
    exposed_s = max(0.0, round_trip_s - compute_s) if schedule.overlap else round_trip_s
    exposed_s = min(max(0.0, total_s - compute_s), exposed_s)
    return _Pace(BlockTime(compute_s, total_s - compute_s - exposed_s, exposed_s), sent)


def _processing_s(rule: Rule, workload: Workload) -> float:
    """A worker's processor time for one exchange of the whole model."""
    return workload.pack_s + (0.0 if rule.codec.exact else workload.codec_s)


def _part(layout: Layout, parts: int) -> Layout:
    """A fragment of the model: of several, one of the mean size."""
    return layout if parts == 1 else layout.cut(0, -(-layout.numel // parts))
