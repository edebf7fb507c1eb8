# SPDX-License-Identifier: Apache-2.0
"""Flat: the back end's own all-reduce, in a few chunks.

    total = sum_i x_i, in whatever order the back end adds

Two to four chunks in flight beat one large all-reduce by a third on links with delay, and let the outer arithmetic of
one chunk run while the next is on its way. Three are in flight here (:mod:`paceline.update.exchange.exchanger`); eight
in all, because the first has to be packed before anything moves and the last applied after everything has: at 1 Gbit/s
that cost 4 % of a synchronisation with four chunks and 3 % with eight. A model of less than 8 MiB has fewer, since each
message costs the processors. Each worker sends 2 (N-1)/N of the bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.topology.base import Direct


@dataclass(frozen=True)
class Flat(Direct):
    """All-reduce among all workers."""

    ordered = False

    def describe(self, workers: int) -> str:
        return f"flat all-reduce in up to {self.chunks} chunks"
