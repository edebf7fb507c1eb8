# SPDX-License-Identifier: Apache-2.0
"""Ordered: the reproducible route, whose bits depend on nothing but what the workers bring.

    all-to-all:   worker k receives slice k of every x_i
    sum:          s_k = (...((x_0k + x_1k) + x_2k) + ...) + x_{N-1,k}        in rank order, on the slice's owner
    all-gather:   everybody receives s_0 .. s_{N-1}

Addition of floating-point numbers is not associative; here its order is fixed, so back end, chunking and transport do
not show in the result, and virtual workers give the bits of real processes. The bytes are those of a ring all-reduce,
2 (N-1)/N; on one machine it costs about twice gloo's all-reduce, because memory is passed over more often.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.rules.topology.base import Direct


@dataclass(frozen=True)
class Ordered(Direct):
    """All-to-all, sum in rank order on the slice's owner, all-gather; the result does not depend on `chunks`."""

    ordered = True

    def describe(self, workers: int) -> str:
        return "flat, summed in rank order (reproducible bits)"
