# SPDX-License-Identifier: Apache-2.0
"""What the recipe `auto` chooses from measured times.

    synchronous steps    where  x / (x + c) <= share
    else blocks          of the first row of `LADDER` whose periods suffice

x is what exchanging gradients during the backward pass keeps a worker beyond computing, c the time of a minibatch, e_k
that of exchanging the whole model once under codec k. Under codec k the least period is

    tau_k = first                           without overlap, if  ceil(e_k (1 - share) / (share c)) <= first
    tau_k = max(first, ceil(1.25 e_k / c))  else, with an overlap of ceil(1.25 e_k / (F c)) minibatches (F fragments)

A row serves the periods from the row before up to its own bound, so neither the period nor the codec's loss ever falls
where the network is slower. Losses of quality, from records/2026-11-21_codecs and records/2026-11-22_blocks (8
workers): bf16 0.0 %, int8 -0.1 %, e3m0 +0.7 % of dense; a period of 8 +0.6 % and of 64 +4.0 % of period 1. So codecs of
16 and 8 bits come before longer periods, and e3m0 before periods above twice the first. `one_bit` gradients are no row:
they send more than `bmuf(period=8, codec='int8')` (16.6 and 11.6 MB there) and end higher (1.658 and 1.613).

A codec that saves less than a third of the bytes of the row before is no candidate. That is all of them for Adam, whose
moments, two thirds of what is sent, are always dense.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.rules.codec import Dense, codec_from_text
from paceline.rules.outer import Average
from paceline.rules.payload import Gradient
from paceline.rules.rule import RecipeCall, Rule
from paceline.rules.schedule import EveryStep, Paced
from paceline.rules.schedule.paced import least_period, simple

LADDER = (("dense", 1), ("bf16", 1), ("int8", 2), ("e3m0", None))
"""(codec, the longest period that it serves, in multiples of the first), from the least loss of quality to the
greatest; None for the longest of all."""
MARGIN = 1.25
"""An overlapped exchange has a quarter more time than it was measured to take."""
WORTH = 2 / 3
"""A codec's bytes over those of the row before, at most."""
BACKWARD = 2 / 3
"""Share of a step in which gradients can be sent (:mod:`paceline_plugins.forecast.planner.workload`)."""
HOPELESS = 2.0
"""Where exchanging gradients takes so many times as long as computing, no overlap hides it."""
OF_SYNC = ("dimensions", "reproducible", "chunks")
"""Settings of `auto` that `sync` has, too."""


@dataclass(frozen=True)
class ProbeTimes:
    """What the workers have measured together.

    Attributes:
        step_s: c, seconds of computing a minibatch, of the usual worker.
        gradient_s: of exchanging gradients after the backward pass, of the slowest worker.
        exposed_s: x, that exchanging them during the pass keeps a worker, of the slowest; None before it is measured.
        block_s: codec -> e, of exchanging the whole model once, of the slowest worker; in the order of `LADDER`, or
            one under the name "" where the codec is given.
    """

    step_s: float
    gradient_s: float
    exposed_s: float | None
    block_s: Mapping[str, float]

    @property
    def hopeless(self) -> bool:
        """Whether exchanging gradients during the pass need not be tried."""
        return self.gradient_s > HOPELESS * self.step_s


@dataclass(frozen=True)
class Choice:
    """A rule that was chosen, as JSON values.

    Attributes:
        lockstep: whether synchronous steps go on; then the others say nothing.
        codec: of blocks; "" for that of the rule that was asked for.
        period: of the first blocks.
        overlap: of blocks.
        why: in one sentence.
    """

    lockstep: bool
    codec: str
    period: int
    overlap: int
    why: str

    def json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


def worth_it(bytes_of: Mapping[str, int]) -> list[str]:
    """The codecs among which is chosen, in the order of `LADDER`; `bytes_of`: what a worker sends for a block."""
    kept = [LADDER[0][0]]
    for codec, _ in LADDER[1:]:
        if bytes_of[codec] <= WORTH * bytes_of[kept[-1]]:
            kept.append(codec)
    return kept


def choose(times: ProbeTimes, schedule: Paced) -> Choice | None:
    """The choice; None where the times do not suffice.

    >>> from paceline.rules.schedule import Probe
    >>> choice = choose(ProbeTimes(0.1, 0.8, None, {"dense": 0.8, "int8": 0.2}), Paced(probe=Probe()))
    >>> choice.codec, choice.period, choice.overlap
    ('int8', 4, 3)

    Args:
        times: the same on all workers.
        schedule: that was asked for; it has a probe.
    """
    limit = f"(limit {100 * schedule.pace.share:g} %)"
    if not times.hopeless:
        if times.exposed_s is None:
            return None
        if times.exposed_s * (1 - schedule.pace.share) <= schedule.pace.share * times.step_s:
            because = f"exchanging gradients keeps a worker for {in_seconds(times.exposed_s)}"
            why = f"synchronous steps: {because} beside {in_seconds(times.step_s)} of computing {limit}"
            return Choice(True, "", 1, 0, why)
    codec, period, overlap = _blocks(times, schedule)
    because = f"a gradient exchange takes {in_seconds(times.gradient_s)}"
    if not times.hopeless and times.exposed_s is not None:
        because = f"exchanging gradients keeps a worker for {in_seconds(times.exposed_s)}"
    kind = f"blocks of {period} minibatches{_written(codec)}, {_hidden(overlap)}"
    why = f"{kind}: {because} beside {in_seconds(times.step_s)} of computing {limit}"
    return Choice(False, codec, period, overlap, why)


def _blocks(times: ProbeTimes, schedule: Paced) -> tuple[str, int, int]:
    """Codec, period and overlap."""
    bounds, pace = dict(LADDER), schedule.pace
    names = list(times.block_s)
    least, chosen = pace.least, ("", 0, 0)
    for codec, block_s in times.block_s.items():
        bound = bounds.get(codec)
        most = pace.longest if bound is None or codec == names[-1] else min(bound * pace.least, pace.longest)
        period, overlap = _least(block_s, times.step_s, schedule)
        chosen = (codec, max(least, min(period, pace.longest)), min(overlap, pace.longest))
        if period <= most:
            break
        least = max(least, most)
    codec, period, overlap = chosen
    return codec, max(period, overlap), overlap


def _least(block_s: float, step_s: float, schedule: Paced) -> tuple[int, int]:
    """(the least period, its overlap) under one codec."""
    first = schedule.pace.least
    assert schedule.probe is not None
    if step_s <= 0:
        return schedule.pace.longest, schedule.overlap
    if not schedule.probe.overlap:
        return schedule.period_for(max(0.0, block_s - schedule.overlap * step_s), step_s), schedule.overlap
    if least_period(block_s, step_s, schedule.pace.share) <= first:
        return first, 0
    period = max(first, simple(max(1, math.ceil(MARGIN * block_s / step_s))))
    return period, math.ceil(MARGIN * block_s / (schedule.fragments * step_s))


def chosen_rule(rule: Rule, choice: Choice, steps: int) -> Rule:
    """The rule that a choice means.

    Args:
        rule: that was asked for.
        choice: what was chosen.
        steps: synchronous steps before it.
    """
    if choice.lockstep:
        same = {name: value for name, value in rule.arguments.items() if name in OF_SYNC}
        name = RecipeCall("sync", same)
        return Rule(EveryStep(), Gradient(), Dense(), rule.common, Average(), name=name)
    pace = rule.paced.pace
    schedule = replace(
        rule.paced,
        period=choice.period,
        warmup=steps,
        overlap=choice.overlap,
        pace=replace(pace, least=max(pace.least, choice.overlap), longest=max(pace.longest, choice.overlap)),
        probe=None,
    )
    settings = {**rule.arguments, "probe": 0, "overlap": choice.overlap}
    if choice.overlap > pace.least:
        settings["first"] = choice.overlap
    if choice.codec:
        rule, settings["codec"] = replace(rule, codec=codec_from_text(choice.codec)), choice.codec
    return replace(rule, schedule=schedule, name=RecipeCall(rule.name, settings))


def without_probe(rule: Rule) -> Rule:
    """The rule that begins with blocks, and chooses their period only."""
    return replace(rule, schedule=replace(rule.schedule, probe=None)) if has_probe(rule) else rule  # type: ignore[type-var]


def has_probe(rule: Rule) -> bool:
    """Whether times choose the rule after a probe."""
    return rule.schedule.probe is not None


def merged(rows: Sequence[Sequence[Any]]) -> tuple[float, float, float | None, list[float]]:
    """(c, gradient_s, x, e of each codec) of all workers: the usual step and the slowest exchanges.

    Args:
        rows: of each worker that has measured: its own.
    """
    steps = sorted(float(row[0]) for row in rows)
    middle = len(steps) // 2
    step_s = steps[middle] if len(steps) % 2 else (steps[middle - 1] + steps[middle]) / 2
    exposed = [row[2] for row in rows]
    return (
        step_s,
        max(float(row[1]) for row in rows),
        None if any(one is None for one in exposed) else max(float(one) for one in exposed),
        [max(column) for column in zip(*(row[3] for row in rows), strict=True)],
    )


def _hidden(overlap: int) -> str:
    return f"overlapped by {overlap}" if overlap else "not overlapped"


def _written(codec: str) -> str:
    return f", {codec}" if codec else ""


def in_seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
