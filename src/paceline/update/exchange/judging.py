# SPDX-License-Identifier: Apache-2.0
"""Whether the loss on held-out data gets worse with a worker's contribution.

Worker j brings d_j to an exchange, with the weight f_j. Worker i is judged: F = sum of all f_j, w = f_i / F, r the mean
norm of the d_j, theta the start of the block. Each other worker k evaluates three models on its own held-out data, the
two means with the buffers that come with them:

    start   = L_k(theta)
    without = L_k(theta + sum over j != i of f_j d_j / (F - f_i))
    with    = L_k(theta + sum over all j of f_j d_j / F)
    e = with - without,     p = start - without,     x = e / (w r)

To first order e = w (p - p_i), where p_i = L_k(theta) - L_k(theta + d_i). So e > w p says that d_i by itself makes the
loss worse. The noise of x, that of the evaluations and of honest contributions together, is measured on X: what worker
k found in its last WINDOW judgements of members that were drawn. Harm is at the upper side of X, so the spread is that
of the lower half. Divided by w r, x does not follow a change of the learning rate. Worker k keeps the evidence S_i
against i:

    s   = 1.4826 * median(median(X) - x' of the x' in X below the median) * (1 + FEW / number of X)
    z   = (x - median(X)) / s
    S_i = S_i + min(z - DRIFT, H / 2)    where e > w max(p, 0) and e > ROUNDING * |without|,     else S_i - DRIFT
    S_i = min(max(S_i, 0), H)

That is a CUSUM test: a member whose blocks are harmful by d standard deviations gains d - DRIFT a judgement, an honest
one loses DRIFT. In normal noise it comes to H in about one of 5,000 judgements, most of them while X is small. At
least two judgements must agree, unless only `with` is not finite. Worker k votes to watch i where S_i > 0, and against
i where S_i = H. What more than half of the other workers vote is done: what i brought is left out, or it counts and i
is watched. Below LEAST_VALUES in X there is no evidence.

Who is judged: every `every`-th exchange one member is drawn. Every second time the members take turns, so that all are
judged. Else the checksum of the sum of all contributions draws, which no member knows before it has sent its own. In
exchanges that draw nobody the watched and the suspects, which were left out, are judged in turn. A suspect stays out
until it passes: its evidence begins at H - DRIFT. (Where nobody else brings anything, `without` is `start`.) Where
suspects would be half of the workers, the votes must be wrong: all are accepted, and X begins anew.

All workers come to the same result, from the headers, from the common sum and from the votes that they exchange.

The idea is Gauntlet's (Templar, arXiv 2505.21684): a contribution counts if the loss does not get worse with it. We
differ: workers vote, no validator scores them, and what decides is measured against the noise of earlier judgements.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.core.rng import mix
from paceline.update.exchange.header import ExchangeSummary, Judgement, from_bits
from paceline.update.exchange.outliers import SIGMA

FIRST = 16
"""So many first exchanges all judge a member, to measure the noise."""
WINDOW = 64
"""Judgements that a worker remembers."""
LEAST_VALUES, FEW = 10, 8
"""Values that tell a spread, and how much wider it is taken where they are few."""
DRIFT = 1.5
"""Standard deviations of harm that are no evidence."""
H = 5.0
"""Evidence that makes a vote against a member, in standard deviations."""
ROUNDING = 2e-6
"""Relative difference of two losses that rounding makes, in float32."""
LEAST_WORKERS = 3
"""Below that there is no majority of the other workers."""


@dataclass(frozen=True)
class Losses:
    """What a worker found on its held-out data; see the module."""

    start: float
    without: float
    with_it: float


@dataclass(frozen=True)
class Choice:
    """Who is judged in an exchange.

    Attributes:
        ranks: among whom one is drawn, or the watched one or suspect whose turn it is.
        drawn: whether one is drawn.
        turn: counts the draws.
    """

    ranks: tuple[int, ...]
    drawn: bool
    turn: int

    def rank(self, checksum: int) -> int:
        """The one that is judged; `checksum` is that of the sum of all contributions."""
        place = mix(checksum, self.turn) if self.turn % 2 == 0 else self.turn // 2
        return self.ranks[place % len(self.ranks)] if self.drawn else self.ranks[0]


def choose(summary: ExchangeSummary, number: int, every: int) -> Choice | None:
    """Who is judged in the exchange of block `number` (the first is 0); None if nobody is."""
    headers = summary.headers
    brings = [rank for rank, h in enumerate(headers) if h.brings and h.factor]
    flagged = [rank for rank in brings if headers[rank].suspect or headers[rank].watched]
    others = tuple(rank for rank in brings if not headers[rank].suspect)
    if len(headers) < LEAST_WORKERS:
        return None
    turn = number if number < FIRST else number // every
    due = number < FIRST or number % every == 0
    if due and len(others) > 1 and not (flagged and turn % 2):
        return Choice(others, True, turn)
    return Choice((flagged[headers[0].sequence % len(flagged)],), False, turn) if flagged else None


def with_waiting_dropped(summary: ExchangeSummary, number: int, every: int) -> ExchangeSummary:
    """The summary with the factor 0 for suspects that are not judged in this exchange."""
    headers = summary.headers
    if not any(h.suspect for h in headers) or len(headers) < LEAST_WORKERS:
        return summary
    choice = choose(summary, number, every)
    judged = choice.ranks if choice is not None and not choice.drawn else ()
    waits = {rank for rank, h in enumerate(headers) if h.suspect and h.brings and h.factor and rank not in judged}
    return without(summary, waits)


def without(summary: ExchangeSummary, ranks: Iterable[int]) -> ExchangeSummary:
    """The summary where the contributions of these ranks are left out."""
    out = set(ranks)
    headers = (replace(h, factor=0.0, usual=False) if rank in out else h for rank, h in enumerate(summary.headers))
    return replace(summary, headers=tuple(headers))


@dataclass(frozen=True)
class Finding:
    """What a worker found in a judgement, until the exchange is applied.

    Attributes:
        rank: who was judged.
        x: of the module.
        evidence: S of that member, from now on.
    """

    rank: int
    x: float
    evidence: float


class Evidence:
    """What earlier judgements of this worker found."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=WINDOW)
        self._against: dict[int, float] = {}  # rank -> S, where it is not 0

    def deviations(self, x: float) -> float:
        """z; 0 where there are too few values."""
        if len(self._values) < LEAST_VALUES:
            return 0.0
        middle = statistics.median(self._values)
        spread = SIGMA * statistics.median([middle - low for low in self._values if low < middle] or [0.0])
        spread *= 1 + FEW / len(self._values)
        return (x - middle) / spread if spread else math.copysign(math.inf, x - middle)

    def find(self, rank: int, losses: Losses, share: float, norm: float, suspect: bool) -> Finding:
        """What this judgement finds.

        Args:
            rank: who is judged.
            losses: that this worker found.
            share: w, of the judged contribution in the mean.
            norm: r, mean of all contributions.
            suspect: whether it was left out before.
        """
        harm = losses.with_it - losses.without
        x = harm / (share * norm)
        before = self._against.get(rank, 0.0)
        if suspect:
            before = max(before, H - DRIFT)
        if not math.isfinite(harm):
            return Finding(rank, x, H if math.isfinite(losses.without) else before)
        progress = max(0.0, losses.start - losses.without)
        gain = -DRIFT
        if harm > share * progress and harm > ROUNDING * abs(losses.without):
            gain = min(self.deviations(x) - DRIFT, H / 2)
        return Finding(rank, x, min(max(before + gain, 0.0), H))

    def keep(self, finding: Finding, drawn: bool) -> None:
        """The exchange was applied; `drawn`: whether the judged one was drawn."""
        self._against[finding.rank] = finding.evidence
        if drawn and math.isfinite(finding.x):
            self._values.append(finding.x)

    def mix(self) -> None:
        """Ranks belong to other workers from now on."""
        self._against.clear()

    def clear(self) -> None:
        """Begin anew."""
        self._against.clear()
        self._values.clear()

    def state(self) -> list[Any]:
        """For a checkpoint or a joining worker: X, and (rank, S) pairs."""
        return [list(self._values), [[rank, s] for rank, s in self._against.items()]]

    def load(self, saved: Sequence[Any]) -> None:
        """Restore what `state` gave."""
        self.clear()
        values, against = saved
        self._values.extend(float(x) for x in values)
        self._against |= {int(rank): float(s) for rank, s in against}


AGAINST, WATCH = 2, 1
"""Votes; 0 where there is no evidence."""


def tally(rows: Sequence[Sequence[int]], rank: int, suspects: int) -> Judgement:
    """Count the votes.

    Args:
        rows: of each worker its vote on the judged one, and the bits of its losses with and without it.
        rank: the judged one, whose row does not count.
        suspects: how many others are suspects.
    """
    others = [row for voter, row in enumerate(rows) if voter != rank]
    against, watch = (sum(row[0] >= vote for row in others) for vote in (AGAINST, WATCH))
    with_it, less = (statistics.median(from_bits(row[k]) for row in others) for k in (1, 2))
    worse = 2 * against > len(others)
    anew = worse and suspects + 1 > len(others) // 2
    left_out, watched = worse and not anew, 2 * watch > len(others)
    return Judgement(rank, against, len(others), (with_it, less), left_out, watched, anew)
