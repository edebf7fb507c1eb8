# SPDX-License-Identifier: Apache-2.0
"""Routes and the dense codec: what is summed, in which order, and what it costs."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from paceline.communication import Transport, virtual
from paceline.rules.codec.base import Codec, State, Steps
from paceline.rules.codec.dense import Dense
from paceline.rules.codec.int8 import Int8
from paceline.rules.codec.layout import Layout
from paceline.rules.topology import Flat, Ordered
from paceline.rules.topology.base import Topology


def inputs(elements: int, workers: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(elements)
    return [torch.randn(elements, generator=g) * 10.0 ** (r % 5) for r in range(workers)]


def finish(steps: Steps[tuple[Tensor, State]]) -> tuple[Tensor, State]:
    """Run an exchange at once."""
    try:
        while True:
            next(steps).wait()
    except StopIteration as end:
        found: tuple[Tensor, State] = end.value
        return found


def total_of(topology: Topology, transport: Transport, x: Tensor, codec: Codec) -> Tensor:
    """One exchange without a state."""
    route = topology.route(transport, codec.operations)
    return finish(route.exchange(codec, x, Layout.vector(x.numel()), {}))[0]


def over(route: Topology, brought: list[Tensor], cuts: list[tuple[int, int]]) -> list[tuple[Tensor, int]]:
    def body() -> tuple[Tensor, int]:
        transport = virtual.current()
        assert transport is not None
        x = brought[transport.world.rank].clone()
        for low, high in cuts:
            x[low:high] = total_of(route, transport, x[low:high].clone(), Dense())
        return x, transport.bytes_sent

    return [r for r in virtual.run(len(brought), body) if r is not None]


@pytest.mark.parametrize("route", [Flat(), Ordered()])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_sum(route: Topology, workers: int) -> None:
    for elements in (1, 3, 4, 12, 1001):
        brought = inputs(elements, workers)
        for x, _ in over(route, brought, [(0, elements)]):
            torch.testing.assert_close(x.double(), sum(b.double() for b in brought), rtol=1e-5, atol=1e-2)


def test_ordered_bits_do_not_depend_on_the_cut() -> None:
    brought = inputs(1000, 4)
    want = ((brought[0] + brought[1]) + brought[2]) + brought[3]
    for cuts in ([(0, 1000)], [(0, 1), (1, 500), (500, 1000)], [(k, k + 100) for k in range(0, 1000, 100)]):
        for x, _ in over(Ordered(), brought, cuts):
            assert torch.equal(x, want)


def test_order_matters_for_these_numbers() -> None:
    """Else the test above could not fail."""
    brought = inputs(1000, 4)
    other = ((brought[3] + brought[2]) + brought[1]) + brought[0]
    assert not torch.equal(((brought[0] + brought[1]) + brought[2]) + brought[3], other)


@pytest.mark.parametrize("route", [Flat(), Ordered()])
def test_bytes(route: Topology) -> None:
    for _, sent in over(route, inputs(1000, 4), [(0, 1000)]):
        assert sent == 2 * 3 * 4 * 1000 // 4 == route.bytes_sent(Dense(), Layout.vector(1000), ["h"] * 4, 0)
    assert route.bytes_sent(Dense(), Layout.vector(1000), ["h"], 0) == 0


@pytest.mark.parametrize("pieces", [1, 2, 3, 4, 7])
def test_cuts_cover_everything_once(pieces: int) -> None:
    from paceline.update.engine.blocks.outer_state import SMALL_ELEMENTS, cut

    for elements in (0, 1, SMALL_ELEMENTS, SMALL_ELEMENTS - 1, 1_000_003, 2_000_003):
        ranges = cut(Layout.vector(elements), pieces, Dense())
        assert ranges[0][0] == 0 and ranges[-1][1] == elements and len(ranges) <= pieces
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert len(ranges) == max(1, min(pieces, elements // SMALL_ELEMENTS))
        assert len(ranges) == 1 or all(high - low > SMALL_ELEMENTS - 64 * pieces for low, high in ranges)


def test_coarse_chunks_are_for_exact_codecs_only() -> None:
    """What a lossy codec loses depends on where chunks are cut, so it is cut alike on every carrier."""
    from paceline.update.engine.blocks.outer_state import cut

    layout = Layout.vector(1 << 22)
    assert len(cut(layout, 4, Dense(), coarse=32)) == 1
    assert len(cut(layout, 4, Dense())) == 4
    assert cut(layout, 4, Int8(), coarse=32) == cut(layout, 4, Int8())
