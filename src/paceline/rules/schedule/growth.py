# SPDX-License-Identifier: Apache-2.0
"""How many workers train: few at first, and more as they come to be worth it.

    k      <- min(N, 2 k)     after a block with  E >= theta k,  at least `blocks` blocks after the last such change
    k      =  k_j  for  m < m_j,  then N                      where stages (k_j, m_j) are given instead
    rate_k =  rate_1 k^s      of the local optimizer, rate_1 being that of one worker

k workers train, of N that there are, and E is how many they are worth (:mod:`paceline.rules.outer.diversity`). At the
start of a training all workers find nearly the same displacement, so that many are worth little; later they differ. m
counts the minibatches of all workers that are in the model.

Source: a batch that grows with the gradient's noise, McCandlish et al., arXiv 1812.06162, and Merrill et al., arXiv
2505.23971; s = 0.29 is the joint fit of DiLoCo's inner rate, Charles et al., arXiv 2503.09799. Where we differ: workers
in place of samples of a minibatch, and E, which block exchanges give for nothing, in place of the noise scale.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from paceline.core.parse import check, check_number, check_whole, is_number, read_call
from paceline.errors import RuleError

RATE_EXPONENT = 0.29
"""s."""
EXAMPLE = '"auto", "auto(first=4)" or "2:4000, 8:16000"'


@dataclass(frozen=True)
class Growth:
    """A number of workers that doubles as the workers come to be worth it.

    >>> from paceline.rules.schedule import Growth
    >>> Growth().next(4, most=64, effective=2.2, blocks=4)  # 2.2 >= 0.5 * 4
    8

    Attributes:
        first: k of the first blocks.
        threshold: theta, above 0; larger ones take longer, for a better model at equal samples.
        blocks: so many at least between two changes.
        rate_exponent: s.
    """

    measures = True  # E

    first: int = 2
    threshold: float = 0.5
    blocks: int = 4
    rate_exponent: float = RATE_EXPONENT

    def __post_init__(self) -> None:
        check_whole("first of a growth", self.first, 2)
        check_whole("blocks of a growth", self.blocks, 1)
        fits = is_number(self.threshold) and self.threshold > 0
        check(fits, "threshold of a growth", "a number above 0", self.threshold)
        check_number("rate_exponent", self.rate_exponent, 0, 1, to=True)

    def next(self, workers: int, most: int, effective: float, blocks: int, minibatches: int = 0) -> int:
        """k of the next block, after so many `blocks` of k `workers` of `most`; E is `effective`, m `minibatches`."""
        grows = blocks >= self.blocks and effective >= self.threshold * workers
        return min(most, 2 * workers) if grows else workers

    def describe(self) -> str:
        return f"{self.first} workers at first, and twice as many when they are worth {100 * self.threshold:g} %"


@dataclass(frozen=True)
class GivenGrowth:
    """A number of workers that grows in given stages.

    >>> from paceline.rules.schedule import GivenGrowth
    >>> GivenGrowth(((2, 4000), (8, 16000))).next(2, most=64, effective=1.0, blocks=1, minibatches=4000)
    8

    Attributes:
        stages: (k_j, m_j), both rising.
        rate_exponent: s.
    """

    measures = False

    stages: tuple[tuple[int, int], ...]
    rate_exponent: float = RATE_EXPONENT

    def __post_init__(self) -> None:
        if not self.stages:
            raise RuleError("a growth in stages needs one, such as (2, 4000)")
        for numbers, what in zip(
            zip(*self.stages, strict=True), ("workers of a stage", "minibatches of a stage"), strict=True
        ):
            for number in numbers:
                check_whole(what, number, 1)
            if list(numbers) != sorted(set(numbers)):
                raise RuleError(f"{what} must rise from stage to stage, got {', '.join(map(str, numbers))}")
        check_number("rate_exponent", self.rate_exponent, 0, 1, to=True)

    @property
    def first(self) -> int:
        """k of the first blocks."""
        return self.stages[0][0]

    def next(self, workers: int, most: int, effective: float, blocks: int, minibatches: int = 0) -> int:
        """k of the next block; see `Growth.next`."""
        wanted = next((number for number, end in self.stages if minibatches < end), most)
        return min(most, max(workers, wanted))

    def describe(self) -> str:
        parts = [f"{number} workers up to {end:,} minibatches of all" for number, end in self.stages]
        return f"{', '.join(parts)}, then as many as there are"


def make_growth(text: str | None, rate_exponent: float | None = None) -> Growth | GivenGrowth | None:
    """The growth that a rule's options describe.

    >>> from paceline.rules.schedule.growth import make_growth
    >>> make_growth("2:4000, 8:16000")
    GivenGrowth(stages=((2, 4000), (8, 16000)), rate_exponent=0.29)

    Args:
        text: "auto", "auto(first=4)", "2:4000, 8:16000", or None for none.
        rate_exponent: s; None for 0.29.

    Raises:
        RuleError: it is none of these.
    """
    if text is None:
        return None
    growth = _read(text)
    return growth if rate_exponent is None else replace(growth, rate_exponent=rate_exponent)


def _read(text: object) -> Growth | GivenGrowth:
    if not isinstance(text, str):
        raise RuleError(f"grow must be text such as {EXAMPLE}, or None, got {text!r}")
    if re.fullmatch(r"\s*\d+\s*:\s*\d+\s*(,\s*\d+\s*:\s*\d+\s*)*", text):
        stages = [one.split(":") for one in text.split(",")]
        return GivenGrowth(tuple((int(workers), int(end)) for workers, end in stages))
    if re.search(r"[:/]", text):
        raise RuleError(
            f"stages are workers and minibatches of all workers, such as 2:4000, 8:16000, got {text!r}; a share of the "
            "training has no meaning here, because a run does not know how long it will be"
        )
    name, settings = read_call(text, "growth", EXAMPLE)
    known = ("first", "threshold", "blocks")
    if name != "auto" or settings.keys() - set(known):
        raise RuleError(f"grow must be {EXAMPLE}; auto takes {', '.join(known)}; got {text!r}")
    return Growth(**settings)


def rate_factor(workers: int, exponent: float = RATE_EXPONENT) -> float:
    """rate_k / rate_1."""
    return float(workers**exponent)
