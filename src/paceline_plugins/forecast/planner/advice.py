# SPDX-License-Identifier: Apache-2.0
"""Recommends a rule and a period: the most frequent exchanges that the network can carry.

Rules that exchange more often stay closer to the result of one worker, so they are tried in this order. The first one
is taken whose exchanges need no more than `SHARE` of the time:

    1. sync
    2. bmuf (bmuf_adam where the optimizer is Adam), with the least sufficient period, up to `LONGEST`
    3. the same with overlap: an exchange runs while the next block computes
    4. streaming_diloco: an eighth of the bytes, with overlap

Each but the last over the fastest of these routes: flat, hosts first, hosts and then racks first, racks first; the last
two where racks and hosts are all full.

The least period is that of :mod:`paceline.rules.schedule.paced`:  tau = ceil(e (1 - share) / (share c)).  Where
waiting for the slowest worker dominates, an asynchronous rule with the same period avoids it (a longer period only
averages it: its share falls with the root of tau); that rule is taken if it is faster by `GAIN` at least.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from paceline.rules.choice import in_short
from paceline.rules.recipes import rule_from_text
from paceline.rules.schedule import Probe
from paceline.rules.schedule.paced import least_period
from paceline.tuning.sync_scaling import SyncScaling
from paceline_plugins.forecast.planner.forecast import Forecast, chosen, forecast
from paceline_plugins.forecast.planner.network import Network
from paceline_plugins.forecast.planner.workload import Workload

SHARE = 0.02
SYNC_SHARE = 0.05
"""For synchronous steps, which need no other hyperparameters."""
LONGEST = 64
FARTHEST = 512
GAIN = 1.15


@dataclass(frozen=True)
class Advice:
    """A recommended rule."""

    rule: str  # text for `--rule`
    period: int  # minibatches of a block
    why: str  # one or two sentences
    forecast: Forecast  # of that rule


@dataclass(frozen=True)
class _Query:
    """The inputs of `recommend`; `look` forecasts the rule of a text."""

    workload: Workload
    network: Network
    workers: int

    def look(self, text: str) -> Forecast:
        return forecast(rule_from_text(text), self.workload, self.network, self.workers)

    def fastest(self, template: str) -> str:
        """The setting of the topology with which the rule `template`, with the route in place of {}, is fastest."""
        return min(self._routes(), key=lambda route: self.look(template.format(route)).step_s)

    def _routes(self) -> Iterator[str]:
        """The flat route, and those that the network's hosts and racks suggest."""
        yield ""
        host, hosts = self.network.per_host, self.network.per_rack
        if 1 < host < self.workers:
            yield 'dimensions="hosts"'
        if hosts > 1 and host * hosts < self.workers and self.workers % (host * hosts) == 0:
            racks = self.workers // (host * hosts)
            if host > 1:
                yield f"dimensions=({host}, {hosts}, {racks})"
            yield f"dimensions=({host * hosts}, {racks})"


def recommend(workload: Workload, network: Network, workers: int) -> Advice:
    """A rule and a period for so many workers.

    Args:
        workload: what one worker does; two moments mean Adam.
        network: between the workers.
        workers: N, at least 1.
    """
    query = _Query(workload, network, workers)
    if workers == 1:
        alone = query.look("sync")
        return Advice(alone.rule, 1, "One worker exchanges nothing; any rule is the program itself.", alone)
    synchronous = query.look(f"sync({query.fastest('sync({})')})")
    share = exchange_share(synchronous)
    if share > SYNC_SHARE:
        return _asynchronous(query, _blocks(query, share))
    why = (
        f"On {network.name}, {workers} workers send their gradients during the backward pass, which exposes only "
        f"{_percent(share)} of the time, so synchronous training is fast enough."
    )
    return _asynchronous(query, Advice(synchronous.rule, 1, why, synchronous))


def of_auto(workload: Workload, network: Network, workers: int) -> str:
    """What `auto`, which needs no choice, does with so many workers, and how fast they are, in one sentence."""
    rule = chosen(rule_from_text("auto"), workload, network, workers)
    speed = forecast(rule, workload, network, workers).speed_up
    line = f"for {workers} workers: auto is {in_short(rule, str(rule.name))}, {speed:.3g} times as fast as one worker"
    if rule.schedule.exchanges_blocks or workers == 1:
        return f"{line}."
    scaling = SyncScaling(workers, began=Probe().steps)
    first = scaling.speed_up(math.ceil(workload.epoch / workers)) * speed / workers
    return f"{line}, and {first:.3g} times in the first pass, in which few train together at first."


def _blocks(query: _Query, synchronous_share: float) -> Advice:
    """A rule that exchanges blocks; `synchronous_share` is the share of exchanges in synchronous steps."""
    name = "bmuf_adam" if query.workload.moments == 2 else "bmuf"
    fastest = query.fastest(f"{name}(period=1, {{}})")
    route = f", {fastest}" if fastest else ""
    reason = (
        f"On {query.network.name}, synchronous steps of {query.workers} workers would wait for exchanges "
        f"{_percent(synchronous_share)} of the time"
    )
    period = least_period(query.look(f"{name}(period=1{route})").exchange_s, query.workload.step_s, SHARE)
    if period <= LONGEST:
        found = query.look(f"{name}(period={period}{route})")
        why = f"{reason}; a block of {period} minibatches brings that to {_percent(exchange_share(found))}."
        return Advice(found.rule, period, why, found)
    overlapped = _least(query, f"{name}(period={{0}}, overlap={{0}}{route})")
    if overlapped is not None and overlapped.period <= LONGEST:
        why = (
            f"{reason}; blocks of {overlapped.period} minibatches, each exchanged while the next one computes, leave "
            f"{_percent(exchange_share(overlapped))}."
        )
        return Advice(overlapped.rule, overlapped.period, why, overlapped)
    return _streaming(query, reason)


def _streaming(query: _Query, reason: str) -> Advice:
    """Four bits a number, for the slowest networks."""
    template = "streaming_diloco(period={0}, overlap={1})"
    found = _least(query, template) or query.look(template.format(FARTHEST, FARTHEST // 4))
    left = _percent(exchange_share(found))
    if found.period <= LONGEST:
        why = (
            f"{reason}; four bits a number, a quarter of the model at a time and during the next steps, once in "
            f"{found.period} minibatches, leave {left}."
        )
    else:
        why = (
            f"{reason}, and even four bits a number need blocks of {found.period} minibatches ({left} is left): "
            "measure how much less the model learns with them, or use fewer workers."
        )
    return Advice(found.rule, found.period, why, found)


def _least(query: _Query, template: str) -> Forecast | None:
    """The first of increasing periods at which exchanges need at most `SHARE`; None where none suffices."""
    period = 4
    while period <= FARTHEST:
        found = query.look(template.format(period, period // 4))
        if exchange_share(found) <= SHARE:
            return found
        period *= 2
    return None


def _asynchronous(query: _Query, found: Advice) -> Advice:
    """An asynchronous rule instead, where it is faster by `GAIN`."""
    share = found.forecast.wait_s / found.forecast.step_s
    if share <= 1 - 1 / GAIN:
        return found
    other = query.look(f"asgd(period={found.period})")
    if other.efficiency < GAIN * found.forecast.efficiency:
        return found
    why = (
        f"Step times differ so much that {_percent(share)} of the time would go into waiting for the slowest worker "
        f"under {found.rule}; asynchronous workers have an efficiency of {_percent(other.efficiency)} instead of "
        f"{_percent(found.forecast.efficiency)}. Lower the learning rate with the number of workers."
    )
    return Advice(other.rule, found.period, why, other)


def exchange_share(found: Forecast) -> float:
    """Share of the time in exchanges."""
    return max(0.0, found.exchange_s / found.step_s)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
