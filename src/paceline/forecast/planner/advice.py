# SPDX-License-Identifier: Apache-2.0
"""Which rule, and which period: the least change of the method that makes the network affordable.

Rules that exchange more often stay nearer to what one worker would learn, so they are tried in this order, and the
first is taken under which exchanges keep workers for no more than `SHARE` of the time:

    1. sync, flat or by way of the hosts
    2. bmuf (bmuf_adam where the optimizer is Adam), with the least period that does it, to `LONGEST`
    3. the same behind the next block
    4. streaming_diloco: an eighth of the bytes, behind the next steps

The least period is that of :mod:`paceline.rules.schedule.paced`:  tau = ceil(e (1 - share) / (share c)).  Where the
wait for the slowest is what is left, a longer period averages it (its share falls with the root of tau), and an
asynchronous rule with the same period does away with it; that one is taken if it is faster by `GAIN` at least.

Source: ours.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.forecast.planner.forecast import Forecast, forecast
from paceline.forecast.planner.network import Network
from paceline.forecast.planner.workload import Conditions, Workload
from paceline.rules.recipes import rule_from_text
from paceline.rules.schedule import paced

SHARE = 0.02
SYNC_SHARE = 0.05
"""Of synchronous steps, which need nothing else to be chosen."""
LONGEST = 64
FARTHEST = 512
GAIN = 1.15


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


@dataclass(frozen=True)
class _Query:
    """What is asked; `look` forecasts a rule's text."""

    workload: Workload
    network: Network
    workers: int
    conditions: Conditions | None

    def look(self, text: str) -> Forecast:
        return forecast(rule_from_text(text), self.workload, self.network, self.workers, self.conditions)

    @property
    def route(self) -> str:
        """By way of the hosts, where several workers share one and there are several."""
        return 'dimensions="hosts"' if 1 < self.network.per_host < self.workers else ""


def recommend(workload: Workload, network: Network, workers: int, conditions: Conditions | None = None) -> Advice:
    """A rule and a period for so many workers.

    Args:
        workload: what one worker does; two moments mean Adam.
        network: between the workers.
        workers: N, at least 1.
        conditions: failures and prices.
    """
    question = _Query(workload, network, workers, conditions)
    if workers == 1:
        alone = question.look("sync")
        return Advice(alone.rule, 1, "One worker has nobody to exchange with: any rule is the program as it is.", alone)
    routes = dict.fromkeys(("", question.route))
    synchronous = min((question.look(f"sync({route})") for route in routes), key=lambda found: found.step_s)
    share = exchange_share(synchronous)
    if share > SYNC_SHARE:
        return _asynchronous(question, _blocks(question, share))
    why = (
        f"On {network.name}, {workers} workers hide their gradients behind the backward pass but for {_percent(share)} "
        "of the time, so nothing has to be given up."
    )
    return _asynchronous(question, Advice(synchronous.rule, 1, why, synchronous))


def _blocks(question: _Query, synchronous_share: float) -> Advice:
    """A rule that exchanges blocks; `synchronous_share` is what exchanges would take of synchronous steps."""
    name = "bmuf_adam" if question.workload.moments == 2 else "bmuf"
    route = f", {question.route}" if question.route else ""
    so = (
        f"On {question.network.name}, synchronous steps of {question.workers} workers would stand still for "
        f"{_percent(synchronous_share)} of the time"
    )
    period = least_period(question.look(f"{name}(period=1{route})").exchange_s, question.workload.step_s)
    if period <= LONGEST:
        found = question.look(f"{name}(period={period}{route})")
        why = f"{so}; a block of {period} minibatches brings that to {_percent(exchange_share(found))}."
        return Advice(found.rule, period, why, found)
    behind = _least(question, f"{name}(period={{0}}, overlap={{0}}{route})")
    if behind is not None and behind.period <= LONGEST:
        why = (
            f"{so}; a block has {behind.period} minibatches and is exchanged behind the next one, which leaves "
            f"{_percent(exchange_share(behind))}."
        )
        return Advice(behind.rule, behind.period, why, behind)
    return _streaming(question, so)


def _streaming(question: _Query, so: str) -> Advice:
    """Four bits a number, for the slowest networks."""
    template = "streaming_diloco(period={0}, overlap={1})"
    found = _least(question, template) or question.look(template.format(FARTHEST, FARTHEST // 4))
    left = _percent(exchange_share(found))
    if found.period <= LONGEST:
        why = (
            f"{so}; what the links carry is four bits a number, a quarter of the model at a time and behind the next "
            f"steps, once in {found.period} minibatches, which leaves {left}."
        )
    else:
        why = (
            f"{so}, and even four bits a number need blocks of {found.period} minibatches ({left} is left): see how "
            "much less the model learns so, or use fewer workers."
        )
    return Advice(found.rule, found.period, why, found)


def _least(question: _Query, template: str) -> Forecast | None:
    """The first of rising periods at which exchanges stay under the share; None where none does."""
    period = 4
    while period <= FARTHEST:
        found = question.look(template.format(period, period // 4))
        if exchange_share(found) <= SHARE:
            return found
        period *= 2
    return None


def _asynchronous(question: _Query, found: Advice) -> Advice:
    """A rule without waiting instead, where waiting is what costs."""
    share = found.forecast.wait_s / found.forecast.step_s
    if share <= 1 - 1 / GAIN:
        return found
    other = question.look(f"asgd(period={found.period})")
    if other.efficiency < GAIN * found.forecast.efficiency:
        return found
    why = (
        f"Step times differ so much that {_percent(share)} of the time would go into waiting for the slowest worker "
        f"under {found.rule}; where each exchanges by itself the efficiency is {_percent(other.efficiency)} instead of "
        f"{_percent(found.forecast.efficiency)}. Lower the learning rate with the number of workers."
    )
    return Advice(other.rule, found.period, why, other)


def least_period(exchange_s: float, minibatch_s: float, share: float = SHARE) -> int:
    """That of :mod:`paceline.rules.schedule.paced`, for the share that is allowed here."""
    return paced.least_period(exchange_s, minibatch_s, share)


def exchange_share(found: Forecast) -> float:
    """Of the time, what goes into exchanges."""
    return max(0.0, found.exchange_s / found.step_s)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if share < 0.1 else f"{100 * share:.0f} %"
