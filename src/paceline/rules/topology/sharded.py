# SPDX-License-Identifier: Apache-2.0
"""Sharded: the server inside the workers. Every worker owns a slice of the parameters, in pieces.

    slice of owner k:   units [k U / N, (k + 1) U / N), rounded down,     U = ceil(n / 64) units of 64 elements
    push and pull:      each piece goes to its owner, and comes back as it is there when the push was applied

n is the number of elements of a *span* (the parameters of one optimizer, one parameter group and one dtype, end to
end), N of workers. Boundaries are multiples of 64 elements, so that a piece begins on a cache line whatever the dtype;
slices differ by one unit at most. Spread so, no link carries more than another: with S bytes of parameters a worker
pushes (N-1)/N S to the other owners, and as an owner answers the others with (N-1)/N S, when each pushes once.

A slice is cut into pieces because a piece is what is locked, applied and answered at once: while one is on the wire the
next is packed and the one before applied. There is no exchange in which all take part, hence no route to bind.

Source: parameter servers (Li et al., OSDI 2014), with the servers' work spread over the workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from paceline.core.parse import check, is_whole
from paceline.rules.codec.base import Codec
from paceline.rules.codec.layout import Layout

UNIT = 64
"""Elements; where slices and pieces are cut."""
ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Cut:
    """One piece of a span.

    Attributes:
        owner: the rank that keeps it.
        begin: its first element in the span.
        end: the first element after it.
    """

    owner: int
    begin: int
    end: int

    @property
    def numel(self) -> int:
        """Its elements."""
        return self.end - self.begin


@dataclass(frozen=True)
class Sharded:
    """Every worker owns a slice, serves it to its peers, and pushes its own work to the owners.

    Attributes:
        piece: elements of a piece, at most; a whole multiple of 64.
    """

    piece: int = 262_144

    def __post_init__(self) -> None:
        fits = is_whole(self.piece) and self.piece >= 1 and self.piece % UNIT == 0
        check(fits, "piece", f"a whole multiple of {UNIT} elements, such as 65536 or 262144", self.piece)

    def slices(self, numel: int, workers: int) -> list[tuple[int, int]]:
        """[begin, end) of each owner in a span of `numel` elements; empty for some where there are few elements."""
        return _even(0, numel, workers)

    def pieces(self, numel: int, workers: int) -> list[Cut]:
        """The pieces of a span of `numel` elements, in order: every element in exactly one."""
        return [
            Cut(owner, *ends)
            for owner, (begin, end) in enumerate(self.slices(numel, workers))
            for ends in _even(begin, end, -(-(end - begin) // self.piece))
        ]

    def frames_sent(self, numel: int, workers: int, rank: int) -> int:
        """Frames that `rank` sends when each worker pushes a span once: its pushes, and its answers as an owner."""
        owned = [cut.owner == rank for cut in self.pieces(numel, workers)]
        return owned.count(False) + (workers - 1) * owned.count(True)

    def bytes_sent(self, codec: Codec, layout: Layout, hosts: Sequence[str], rank: int) -> int:
        """Bytes that `rank` sends when each worker pushes once: 2 (N-1)/N * 4 n, but for the unit at the ends."""
        begin, end = self.slices(layout.numel, len(hosts))[rank]
        own = end - begin
        return ELEMENT_BYTES * (layout.numel - own + (len(hosts) - 1) * own)

    def describe(self, workers: int) -> str:
        return f"to the owners of the slices, in pieces of at most {self.piece:,} elements"


def _even(begin: int, end: int, parts: int) -> list[tuple[int, int]]:
    """[begin, end) in so many parts that differ by a unit at most; `begin` is a multiple of the unit."""
    units = -(-(end - begin) // UNIT)
    ends = [min(end, begin + k * units // parts * UNIT) for k in range(parts + 1)] if parts else []
    return list(pairwise(ends))
