# SPDX-License-Identifier: Apache-2.0
"""What the recipe `auto` chooses from measured times.

    r = 1.25 e / c, rounded up to 2 * 4^k       e: seconds of a gradient exchange, c: of computing a minibatch

    synchronous steps    where what the backward pass leaves of an exchange takes at most `share` of the time
    else blocks          of the first codec of `LADDER` under which n = ceil(r * bytes / F) minibatches hide an exchange
                         of the whole model, n being within the codec's bound; the last codec's bound is `longest`

    overlap = max(n, first / 2)                 none where blocks of `first` keep exchanges at `share` without
    period  = max(first, overlap), a simple number

r is rough, so that runs repeat: from the middle of a step a factor of two either way changes nothing. `bytes` are a
block's over those of gradients, which depend on the model alone; F is the number of fragments.

Losses of quality, from records/2026-11-21_codecs and records/2026-11-22_blocks (8 workers): bf16 0.0 %, int8 -0.1 %,
e3m0 +0.7 % of dense; a period of 8 +0.6 % and of 64 +4.0 % of period 1. So bf16 comes before periods above `first`, and
codecs of 8 and 4 bits come where bf16 does not fit periods up to `GOOD` times that. A codec that saves less than a
third of the bytes of the one before is no candidate: none is for Adam, whose moments are dense, nor for small models.

Where the length of a pass is known, the period leaves `BLOCKS` blocks in it, or in ten passes where shorter blocks
would wait for exchanges.

Source: ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from paceline.rules.codec import Dense, codec_from_text
from paceline.rules.outer import Average
from paceline.rules.payload import Gradient
from paceline.rules.rule import RecipeCall, Rule
from paceline.rules.schedule import EveryStep, Paced, Probe
from paceline.rules.schedule.growth import RATE_EXPONENT
from paceline.rules.schedule.paced import least_period, rough, simple

LADDER = ("dense", "bf16", "int8", "e3m0")
"""Codecs from the least loss of quality to the greatest."""
COSTS = {"int8": "nothing that was measured (-0.1 % of the loss)", "e3m0": "0.7 % of the loss (0 to 1.4 %)"}
GOOD = 4
"""The longest good period, in multiples of the first: longer ones cost more than codecs of 4 bits."""
MARGIN = 1.25
"""An overlapped exchange has at least a quarter more time than it was measured to take."""
WORTH = 2 / 3
"""A codec's bytes over those of the one before, at most."""
SMALL = 1 << 20
"""Bytes of a block below which no codec makes an exchange faster."""
BLOCKS = 100
"""That a pass should have: with few, block momentum does not come into effect."""
BACKWARD = 2 / 3
"""Share of a step in which gradients can be sent (:mod:`paceline_plugins.forecast.planner.workload`)."""
OF_SYNC = ("dimensions", "reproducible", "chunks")
"""Settings of `auto` that `sync` has, too."""
OWN = ("share", "first", "longest", "probe", "sync_rate")
"""Settings of `auto` that `bmuf` has not."""


@dataclass(frozen=True)
class Measured:
    """What the workers have measured together.

    Attributes:
        step_s: c, seconds of computing a minibatch, of the usual worker.
        exchange_s: e, of exchanging gradients, or the model in blocks, of the slowest worker.
        minibatches: that a worker makes in a pass; None if unknown.
    """

    step_s: float
    exchange_s: float
    minibatches: int | None = None

    @property
    def exact(self) -> float:
        return self.exchange_s / self.step_s if self.step_s > 0 else math.inf

    @property
    def ratio(self) -> float:
        """r, rough."""
        return rough(min(max(MARGIN * self.exact, 1e-4), 1e4))

    @property
    def words(self) -> str:
        timed = f"takes {in_seconds(self.exchange_s)} beside {in_seconds(self.step_s)} of computing"
        return timed if self.exchange_s else "takes no time among virtual workers"


@dataclass(frozen=True)
class Choice:
    """A rule that was chosen, as JSON values.

    Attributes:
        lockstep: whether synchronous steps go on; then the others say nothing.
        codec: of blocks; "" for that of the rule that was asked for.
        period: of the first blocks.
        overlap: of blocks.
        why: in one sentence.
        blind: whether it was chosen without times.
        turns: whether few workers make synchronous steps together at first (:mod:`paceline.tuning.sync_scaling`).
    """

    lockstep: bool
    codec: str
    period: int
    overlap: int
    why: str
    blind: bool = False
    turns: bool = False

    def json(self) -> dict[str, Any]:
        """For a checkpoint."""
        return asdict(self)


def worth_it(bytes_of: Mapping[str, int]) -> list[str]:
    """The codecs among which is chosen, in the order of `LADDER`; `bytes_of`: what a worker sends for a block."""
    kept = [LADDER[0]]
    for codec in LADDER[1:] if bytes_of[LADDER[0]] > SMALL else ():
        if bytes_of[codec] <= WORTH * bytes_of[kept[-1]]:
            kept.append(codec)
    return kept


def block_sizes(rule: Rule, bytes_of: Callable[[Rule], int], gradients: float) -> dict[str, float]:
    """Codec -> bytes of a block over those of `gradients`, for :func:`choose`; `bytes_of`: what a worker sends for a
    block of a rule, which is asked of the codecs from which `rule` chooses."""
    if not (rule.schedule.probe or Probe()).codec:
        return {"": bytes_of(rule) / max(1, gradients)}
    sent = {codec: bytes_of(replace(rule, codec=codec_from_text(codec))) for codec in LADDER}
    return {codec: sent[codec] / max(1, gradients) for codec in worth_it(sent)}


def exposed_s(gradient_s: float, chunks: int, step_s: float) -> float:
    """What the backward pass leaves of an exchange of gradients in evenly spaced chunks."""
    return max(gradient_s / chunks, gradient_s - (1 - 1 / chunks) * BACKWARD * step_s)


def choose(times: Measured, schedule: Paced, sizes: Mapping[str, float], chunks: int, uneven: str = "") -> Choice:
    """The choice, the same for the same arguments.

    >>> from paceline.rules.schedule import Probe
    >>> choice = choose(Measured(0.1, 0.6), Paced(probe=Probe()), {"dense": 1.0, "bf16": 0.5}, 1)
    >>> choice.codec, choice.period, choice.overlap, choice.why
    ('bf16', 4, 4, 'a gradient exchange takes 0.6 s beside 0.1 s of computing')

    Args:
        times: of exchanging gradients.
        schedule: that was asked for; it has a probe.
        sizes: codec -> bytes of a block over those of gradients, in the order of `LADDER`, or one under the name ""
            where the codec is given.
        chunks: of an exchange of gradients that the backward pass hides; 1 if it hides none.
        uneven: why workers should not wait for each other at each step; empty if they may.
    """
    why, pace = uneven or f"a gradient exchange {times.words}", schedule.pace
    if not uneven and exposed_s(times.ratio, chunks, 1.0) * (1 - pace.share) <= pace.share:
        return Choice(True, "", 1, 0, why)
    least, chosen = pace.least, ("", 0, 0)
    for codec, size in sizes.items():
        bound = pace.least if codec == "dense" else min(GOOD * pace.least, pace.longest)
        bound = pace.longest if codec == list(sizes)[-1] else bound
        period, overlap = hidden(times, size, schedule, schedule.probe is not None and schedule.probe.overlap)
        chosen = codec, max(least, period), overlap
        if period <= bound:
            break
        least = max(least, bound)
    codec, period, overlap = chosen
    most = most_minibatches(times.minibatches, overlap, schedule.fragments)
    if most < period:
        why += f", and a pass has {times.minibatches} minibatches"
    return Choice(False, codec, min(period, most), min(overlap, most), why)


def hidden(times: Measured, size: float, schedule: Paced, overlaps: bool) -> tuple[int, int]:
    """(period, overlap) where an exchange takes `size` times as long; `overlaps`: whether the overlap follows."""
    pace, given = schedule.pace, schedule.overlap
    if not overlaps:
        left = schedule.fragments * max(0.0, times.exact * size / schedule.fragments - given)
        return max(schedule.period_for(left, 1.0), given), given
    if least_period(times.ratio * size, 1.0, pace.share) <= pace.least:
        return pace.least, 0
    need = math.ceil(times.ratio * size / schedule.fragments - 1e-9)
    overlap = min(max(need, pace.least // 2), pace.longest)
    return pace.bounded(simple(max(1, overlap))), overlap


def most_minibatches(of_pass: int | None, hides: int, fragments: int = 1) -> int:
    """The longest period for passes of that length; `hides`: minibatches that hide an exchange.

    >>> most_minibatches(10, 2), most_minibatches(150, 2), most_minibatches(150, 8), most_minibatches(1000, 2)
    (1, 2, 8, 10)
    """
    if of_pass is None:
        return 1 << 30
    return max(fragments, of_pass // BLOCKS, min(hides, 10 * of_pass // BLOCKS))


def chosen_rule(rule: Rule, choice: Choice, steps: int, kind: str) -> Rule:
    """The rule that a choice means.

    Args:
        rule: that was asked for.
        choice: what was chosen.
        steps: synchronous steps before it.
        kind: "bmuf" or "bmuf_adam", by which it can be asked for.
    """
    if choice.lockstep:
        same = {name: value for name, value in rule.arguments.items() if name in OF_SYNC}
        name = RecipeCall("sync", same)
        return Rule(EveryStep(), Gradient(), Dense(), rule.common, Average(), name=name)
    schedule = replace(rule.paced, period=choice.period, warmup=steps, overlap=choice.overlap, probe=None)
    arguments = dict(rule.arguments)
    if choice.codec:
        rule, arguments["codec"] = replace(rule, codec=codec_from_text(choice.codec)), choice.codec
    return named(replace(rule, schedule=schedule, name=RecipeCall(kind, arguments)), kind)


def named(rule: Rule, kind: str) -> Rule:
    """The same blocks, by the name under which they can be asked for."""
    return replace(rule, name=RecipeCall(kind, as_blocks(rule, kind))) if rule.schedule.exchanges_blocks else rule


def as_blocks(rule: Rule, kind: str) -> dict[str, Any]:
    """The arguments by which the recipe `kind` makes the same blocks as a rule of `auto`."""
    schedule, given = rule.schedule, rule.arguments
    now: dict[str, Any] = {"period": schedule.period, "codec": given.get("codec") or "dense"}
    now |= {"overlap": schedule.overlap, "warmup": schedule.warmup}
    without = {"codec": "dense", "overlap": 0, "warmup": 0}
    kept = {name: value for name, value in now.items() if without.get(name) != value}
    rest = {"rate_exponent": RATE_EXPONENT} | {name: given[name] for name in given if name not in (*OWN, *now)}
    if not rule.settings.even:
        rest["even"] = False
    if kind == "bmuf":
        rest.pop("beta1", None)
    return kept | rest


def in_short(rule: Rule, kind: str) -> str:
    """The numbers that were chosen, as `bmuf(period=8, codec='bf16', overlap=2)`."""
    if not rule.schedule.exchanges_blocks:
        return str(rule.name)
    shown = {name: value for name, value in as_blocks(rule, kind).items() if name in ("period", "codec", "overlap")}
    return f"{kind}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def without_probe(rule: Rule) -> Rule:
    """The rule that begins with blocks, and chooses their period only."""
    return rule if rule.schedule.probe is None else replace(rule, schedule=replace(rule.paced, probe=None))


def least_known(lengths: Iterable[int | None]) -> int | None:
    """The fewest minibatches of a pass on any worker; None if no worker knows."""
    return min((one for one in lengths if one is not None), default=None)


def in_seconds(seconds: float) -> str:
    return f"{seconds:.2g} s" if seconds >= 0.01 else f"{1e3 * seconds:.2g} ms"
