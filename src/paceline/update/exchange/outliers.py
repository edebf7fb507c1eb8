# SPDX-License-Identifier: Apache-2.0
"""Which contributions are outliers, by their norm.

With x_ij the norm that worker i brought to exchange j and was accepted, over the last `window` exchanges of all
workers, and l = log x:

    limit(l)  = exp(median(l) + max(log least, threshold * 1.4826 * median|l - median(l)|))
    unusual   : x_i > max(limit(all l), limit(l of worker i alone))

A few accepted outliers do not move the median and the median absolute deviation (times 1.4826, the standard deviation
of a normal distribution). Logarithms, because norms spread over orders of magnitude. A worker whose norms are always
larger, because its data differ, is compared with itself as well. Only large norms are unusual: a small contribution
does no harm. Before `history` exchanges a norm is compared with that of the n parameters w:

    unusual   : x_i > FAR * max(norm of w, LEAST * root of n)          1000 times as far, for gradients a million times

A worker reports that its norm is unusual, and its contribution is dropped, unless the scale itself has changed (a
learning rate, a warm-up that ends): `outliers` accepts all where more than half of the workers are unusual at once, and
a worker that is not far above the usual ones. After such a change the window starts afresh.

All workers compute the same result from the same headers. A public predecessor is EDiT's z-score of pseudo-gradients
(arXiv 2412.07210), with an exponential mean and variance instead of medians, for each worker alone.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.core.parse import is_whole
from paceline.errors import UnsupportedError

SIGMA = 1.4826
"""Standard deviations of a normal distribution in its median absolute deviation."""
APART = 3.0
"""An outlier's norm is at least so many times the median of the usual norms of the same exchange."""
FAR, FAR_GRADIENT = 1e3, 1e6
"""A block's delta, and a gradient, is unusual above so many times the norm of the parameters."""
LEAST = 1e-3
"""Least root mean square of parameters that is assumed: all may begin at 0."""


@dataclass(frozen=True)
class Guard:
    """When a contribution is rejected: its norm is too large.

    >>> from paceline import Guard
    >>> guard = Guard(window=16, history=4)
    >>> round(guard.limit([1.0, 1.2, 0.9, 1.1]), 1)  # of a norm that is still usual beside these
    10.5

    Attributes:
        window: exchanges that are remembered.
        threshold: robust standard deviations of the logarithm of the norm.
        least: a norm below so many times the median is never unusual.
        history: exchanges before anything is judged.
        gradients: whether the norms of the gradients of single steps are judged as well, where a rule exchanges them.
    """

    window: int = 32
    threshold: float = 8.0
    least: float = 10.0
    history: int = 8
    gradients: bool = True

    def __post_init__(self) -> None:
        for name, value in (("window", self.window), ("history", self.history)):
            if not is_whole(value) or value < 2:
                raise UnsupportedError(f"{name} of a guard must be a whole number, at least 2, got {value!r}")
        if self.history > self.window:
            raise UnsupportedError(
                f"a guard that remembers {self.window} exchanges never has {self.history}; raise window"
            )
        if not self.threshold > 0 or not self.least >= 1:
            raise UnsupportedError(
                f"threshold of a guard must be above 0 and least at least 1, got {self.threshold!r} and {self.least!r}"
            )

    def limit(self, norms: Sequence[float]) -> float:
        """The largest norm that is usual beside these, all above 0; infinite where there are too few."""
        if len(norms) < self.history:
            return math.inf
        logs = [math.log(norm) for norm in norms]
        middle = statistics.median(logs)
        spread = SIGMA * statistics.median(abs(one - middle) for one in logs)
        return math.exp(min(700.0, middle + max(math.log(self.least), self.threshold * spread)))


GUARDS = {"auto": Guard(gradients=False), "outliers": Guard()}
"""What the words mean."""


def make_guard(guard: Guard | str | None) -> Guard | None:
    """What `attach(guard=...)` means: "auto" guards blocks, "outliers" gradients as well, None nothing."""
    if guard is None or isinstance(guard, Guard):
        return guard
    if guard not in GUARDS:
        raise UnsupportedError(f'guard must be "auto", "outliers", a paceline.Guard or None, got {guard!r}')
    return GUARDS[guard]


class Norms:
    """The norms accepted in the last exchanges of one payload, the same on every worker; `farthest` gives the largest
    usual norm while there is no history."""

    def __init__(self, guard: Guard, farthest: Callable[[], float] = lambda: math.inf) -> None:
        self.guard, self._farthest = guard, farthest
        self._rows: deque[dict[int, float]] = deque(maxlen=guard.window)

    def usual(self, rank: int, norm: float) -> bool:
        """Whether a norm is usual among the accepted norms of all workers, or of `rank`."""
        if len(self._rows) < self.guard.history:
            return norm <= self._farthest()
        if norm <= self.guard.limit([value for row in self._rows for value in row.values()]):
            return True
        own = [row[rank] for row in self._rows if rank in row]
        return len(own) >= self.guard.history and norm <= self.guard.limit(own)

    def add(self, accepted: Mapping[int, float], changed: bool = False) -> tuple[float, float] | None:
        """Add the norms of an exchange by rank, to a fresh window if most have `changed`; the least and the greatest
        norm before, None where there is no history."""
        values = [value for row in self._rows for value in row.values()]
        between = (min(values), max(values)) if len(self._rows) >= self.guard.history else None
        if changed:
            self._rows.clear()
        row = {rank: norm for rank, norm in accepted.items() if 0 < norm < math.inf}
        if row:
            self._rows.append(row)
        return between

    def mix(self) -> None:
        """Keep the norms without their ranks, which belong to other workers from now on."""
        self._rows = deque(
            ({-1 - k: norm for k, norm in enumerate(row.values())} for row in self._rows), self._rows.maxlen
        )

    def state(self) -> list[list[list[float]]]:
        """The window for a checkpoint or a joining worker: (rank, norm) pairs of each exchange."""
        return [[[rank, norm] for rank, norm in row.items()] for row in self._rows]

    def load(self, saved: Iterable[Iterable[Sequence[Any]]]) -> None:
        self._rows.clear()
        self._rows.extend({int(rank): float(norm) for rank, norm in row} for row in saved)


@torch.no_grad()
def farthest(parameters: Iterable[Tensor], times: float) -> float:
    """The largest usual norm by the norm of these parameters; infinite where they are not finite."""
    square, count = 0.0, 0
    for one in parameters:
        square += float(torch.linalg.vector_norm(one)) ** 2
        count += one.numel()
    size = max(math.sqrt(square), LEAST * math.sqrt(count)) if math.isfinite(square) else math.inf
    return times * size


def outliers(said: Mapping[int, tuple[float, bool]]) -> set[int]:
    """The ranks whose contributions are rejected, by the norm of each finite one, and whether it is usual."""
    moved = {rank: one for rank, one in said.items() if one[0] > 0}  # a worker that has not moved knows no scale
    usual = [norm for norm, fits in moved.values() if fits]
    if 2 * len(usual) < len(moved) or not usual:  # most say so: the scale has changed
        return set()
    middle = statistics.median(usual)
    return {rank for rank, (norm, fits) in moved.items() if not fits and norm > APART * middle}
