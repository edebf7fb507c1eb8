# SPDX-License-Identifier: Apache-2.0
"""Which rule, and which period: the least change of the method that makes the network affordable.

Rules that exchange more often stay nearer to what one worker would learn, so they are tried in this order, and the
first is taken under which exchanges keep workers for no more than `SHARE` of the time:

    1. sync, flat or by way of the hosts
    2. bmuf (bmuf_adam where the optimizer is Adam), with the least period that does it, to `LONGEST`
    3. the same behind the next block
    4. streaming_diloco: an eighth of the bytes, behind the next steps

The least period is that of :mod:`paceline.tuning.exchange_time`:  tau = ceil(e (1 - share) / (share c)).  Where the
wait for the slowest is what is left, a longer period averages it (its share falls with the root of tau), and an
asynchronous rule with the same period does away with it; that one is taken if it is faster by `GAIN` at least.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from paceline.errors import RuleError
from paceline.planner.forecast import Forecast, forecast
from paceline.planner.network import Network
from paceline.planner.workload import Conditions, Workload
from paceline.recipes import rule_from_text

SHARE = 0.02
SYNC_SHARE = 0.05
"""Of synchronous steps, which need nothing else to be chosen."""
LONGEST = 64
FARTHEST = 512
GAIN = 1.15

Look = Callable[[str], Forecast]


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        rule: text for `--rule`.
        period: minibatches of a block.
        why: one or two sentences.
        forecast: what to expect of it.
    """

    rule: str
    period: int
    why: str
    forecast: Forecast


def recommend(workload: Workload, network: Network, workers: int, conditions: Conditions | None = None) -> Advice:
    """A rule and a period for so many workers.

    Args:
        workload: what one worker does; two moments mean Adam.
        network: between the workers.
        workers: N, at least 1.
        conditions: failures and prices.
    """

    def look(text: str) -> Forecast:
        return forecast(rule_from_text(text), workload, network, workers, conditions)

    if workers == 1:
        return Advice(
            "sync", 1, "One worker has nobody to exchange with: any rule is the program as it is.", look("sync")
        )
    hierarchical = 'dimensions="hosts"' if 1 < network.per_host < workers else ""
    synchronous = _synchronous(look, hierarchical)
    if exchange_share(synchronous) <= SYNC_SHARE:
        found = Advice(
            synchronous.rule,
            1,
            f"On {network.name}, {workers} workers hide their gradients behind the backward pass but for "
            f"{_percent(exchange_share(synchronous))} of the time, so nothing has to be given up.",
            synchronous,
        )
    else:
        found = _blocks(look, workload, network, workers, hierarchical, synchronous)
    return _asynchronous(look, found)


def _synchronous(look: Look, hierarchical: str) -> Forecast:
    """The faster route of the synchronous rule."""
    return min((look(f"sync({more})") for more in {"", hierarchical}), key=lambda found: (found.step_s, found.rule))


def _blocks(
    look: Look, workload: Workload, network: Network, workers: int, hierarchical: str, synchronous: Forecast
) -> Advice:
    """A rule that exchanges blocks."""
    name = "bmuf_adam" if workload.moments == 2 else "bmuf"
    more = f", {hierarchical}" if hierarchical else ""
    so = (
        f"On {network.name}, synchronous steps of {workers} workers would stand still for "
        f"{_percent(exchange_share(synchronous))} of the time"
    )
    period = least_period(look(f"{name}(period=1{more})").exchange_s, workload.step_s)
    if period <= LONGEST:
        found = look(f"{name}(period={period}{more})")
        return Advice(found.rule, period, f"{so}; a block of {period} minibatches brings that to "
                      f"{_percent(exchange_share(found))}.", found)  # fmt: skip
    for template, why in (
        (f"{name}(period={{0}}, overlap={{0}}{more})", "and is exchanged behind the next one"),
        ("streaming_diloco(period={0}, overlap={1})", "in four bits, a quarter of the model at a time and behind the "
         "next steps, is what the links carry"),
    ):  # fmt: skip
        chosen = _least(look, template)
        if chosen is not None and chosen.period <= LONGEST:
            return Advice(chosen.rule, chosen.period, f"{so}; a block has {chosen.period} minibatches {why}, which "
                          f"leaves {_percent(exchange_share(chosen))}.", chosen)  # fmt: skip
    if chosen is None:
        chosen = look(template.format(FARTHEST, FARTHEST // 4))
    return Advice(
        chosen.rule,
        chosen.period,
        f"{so}, and even four bits a number need blocks of {chosen.period} minibatches "
        f"({_percent(exchange_share(chosen))} is left): measure how much less the model learns so, or use fewer workers.",
        chosen,
    )


def _least(look: Look, template: str) -> Forecast | None:
    """The first of rising periods at which exchanges stay under the share; None where none does."""
    period = 4
    while period <= FARTHEST:
        found = look(template.format(period, max(1, period // 4)))
        if exchange_share(found) <= SHARE:
            return found
        period *= 2
    return None


def _asynchronous(look: Look, found: Advice) -> Advice:
    """A rule without waiting instead, where waiting is what costs."""
    share = found.forecast.wait_s / found.forecast.step_s
    if share <= 1 - 1 / GAIN:
        return found
    other = look(f"asgd(period={found.period})")
    if other.efficiency < GAIN * found.forecast.efficiency:
        return found
    why = (
        f"Step times differ so much that {_percent(share)} of the time would go into waiting for the slowest worker "
        f"under {found.rule}; where each exchanges by itself the efficiency is {_percent(other.efficiency)} instead of "
        f"{_percent(found.forecast.efficiency)}. Lower the learning rate with the number of workers."
    )
    return Advice(other.rule, found.period, why, other)


def least_period(exchange_s: float, minibatch_s: float, share: float = SHARE) -> int:
    """tau = ceil(e (1 - share) / (share c)), at least 1; e an exchange's, c a minibatch's seconds."""
    if not 0 < share < 1:
        raise RuleError(f"share must lie between 0 and 1, got {share!r}")
    return max(1, math.ceil(exchange_s * (1 - share) / (share * minibatch_s) - 1e-9))


def exchange_share(found: Forecast) -> float:
    """Of the time, what goes into exchanges."""
    return max(0.0, found.exchange_s / found.step_s)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
