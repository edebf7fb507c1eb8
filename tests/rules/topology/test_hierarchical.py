# SPDX-License-Identifier: Apache-2.0
"""The hierarchical route: what is summed, what crosses which links, and what a lossy codec gets to see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.communication import SoloTransport, virtual
from paceline.errors import RuleError
from paceline.rules.codec.base import State, Steps, Wire
from paceline.rules.codec.dense import Dense
from paceline.rules.codec.layout import Layout
from paceline.rules.topology import Flat, Hierarchical
from paceline.rules.topology.hierarchical import DimensionPlan
from tests.rules.topology.test_routes import finish, inputs, total_of
from tests.tables import each_value_fast

SHAPES: list[tuple[Any, list[str]]] = [
    ((4, 2), ["h"] * 8),
    ((2, 4), ["h"] * 8),
    ((2, 2, 2), ["h"] * 8),
    ((2, 1, 3), ["h"] * 6),
    ("hosts", ["a"] * 4 + ["b"] * 4),
    ("hosts", ["a", "b"] * 4),
    ("hosts", ["a"] * 3 + ["b"] * 2),
    ("hosts", ["a"] * 4 + ["b"] * 2 + ["c"]),
    ("hosts", ["c", "a", "a", "b", "a", "b", "a"]),
    ("hosts", ["a"] * 3),
    ("hosts", ["a", "b", "c"]),
    ((3,), ["h"] * 3),
]


class Coarse:
    """Rounds to whole numbers and feeds back what it dropped, through `all_to_all` alone."""

    exact, operations, whole = False, 1, False

    def at(self, number: int) -> Coarse:
        return self

    def exchange(self, x: Tensor, layout: Layout, wire: Wire, state: State) -> Steps[tuple[Tensor, State]]:
        assert layout.numel == x.numel()
        if "residual" in state:
            x.add_(state["residual"])
        sent = x.round()
        x.sub_(sent)
        bits = sent.to(torch.int8).view(torch.uint8)
        arrived = torch.empty(wire.size * x.numel(), dtype=torch.uint8)
        sizes = [x.numel()] * wire.size
        yield wire.all_to_all(arrived, bits.repeat(wire.size), sizes, sizes)
        return arrived.view(torch.int8).view(wire.size, -1).float().sum(0), {"residual": x}

    def bytes_sent(self, layout: Layout, workers: int, rank: int) -> int:
        return layout.numel * (workers - 1)

    def describe(self, workers: int) -> str:
        return "coarse"


def everywhere(hosts: list[str], body: Callable[[virtual.VirtualTransport], Any]) -> list[Any]:
    def one() -> Any:
        transport = virtual.current()
        assert transport is not None
        return body(transport)

    return list(virtual.run(len(hosts), one, hosts))


@pytest.mark.parametrize(("shape", "ordered", "elements"), each_value_fast(SHAPES, [False, True], [1, 7, 1000]))
def test_it_is_the_flat_sum(shape: tuple[Any, list[str]], ordered: bool, elements: int) -> None:
    dimensions, hosts = shape
    brought = inputs(elements, len(hosts))
    topology = Hierarchical(dimensions, ordered=ordered)

    def body(transport: virtual.VirtualTransport) -> tuple[Tensor, ...]:
        x = brought[transport.world.rank]
        whole = (x * 1e6).long()
        flat = total_of(Flat(), transport, whole.clone(), Dense())
        return (
            total_of(topology, transport, x.clone(), Dense()),
            total_of(topology, transport, x.double(), Dense()),
            total_of(topology, transport, whole, Dense()),
            flat,
        )

    results = everywhere(hosts, body)
    want = sum(b.double() for b in brought)
    for single, double, whole, flat in results:
        assert torch.equal(single, results[0][0]) and torch.equal(double, results[0][1])
        torch.testing.assert_close(single.double(), want, rtol=1e-5, atol=1e-2)
        torch.testing.assert_close(double, want, rtol=1e-12, atol=1e-10)
        assert torch.equal(whole, flat)


@pytest.mark.parametrize(("dimensions", "hosts"), SHAPES)
def test_bytes(dimensions: Any, hosts: list[str]) -> None:
    topology = Hierarchical(dimensions)
    cases = [(codec, Layout.vector(elements)) for codec in (Dense(), Coarse()) for elements in (1, 7, 1000, 1001)]

    def body(transport: virtual.VirtualTransport) -> list[int]:
        route, sent = topology.route(transport, 1), []
        for codec, layout in cases:
            before = transport.bytes_sent
            finish(route.exchange(codec, torch.zeros(layout.numel), layout, {}))
            sent.append(transport.bytes_sent - before)
        return sent

    ranks = range(len(hosts))
    assert everywhere(hosts, body) == [[topology.bytes_sent(*case, hosts, rank) for case in cases] for rank in ranks]


def test_bytes_by_hand() -> None:
    """4 x 2, n = 1000: 3/4 of 4000 there and back inside, and a ring of two over a quarter across."""
    layout, hosts = Layout.vector(1000), ["a"] * 4 + ["b"] * 4
    for rank in range(8):
        assert Hierarchical().slow_bytes(Dense(), layout, hosts, rank) == 1000
        assert Hierarchical().bytes_sent(Dense(), layout, hosts, rank) == 2 * 3000 + 1000
    # 2 + 1, n = 1000: one owner on each host; the other sends everything and owns nothing
    sent = [Hierarchical().bytes_sent(Dense(), layout, ["a", "a", "b"], rank) for rank in range(3)]
    assert sent == [4000 + 4000, 4000, 4000]
    assert Hierarchical().slow_bytes(Dense(), layout, ["a", "a", "b"], 1) == 0


def test_the_dense_volume_is_that_of_a_flat_ring() -> None:
    layout = Layout.vector(8000)
    for dimensions in ((4, 2), (2, 4), (2, 2, 2), (8,)):
        assert Hierarchical(dimensions).bytes_sent(Dense(), layout, ["h"] * 8, 3) == 2 * 7 * 4 * 8000 // 8


@pytest.mark.parametrize(("dimensions", "hosts"), SHAPES)
def test_a_lossy_codec_sees_the_sums_of_the_fast_dimensions_only(dimensions: Any, hosts: list[str]) -> None:
    """Nothing is lost over time: what all have sent and the residuals of all shards make what was given."""
    elements, workers = 50, len(hosts)
    g = torch.Generator().manual_seed(1)
    given = torch.rand(5, workers, elements, generator=g).mul_(64).round_().div_(64)  # sums of them are exact
    topology = Hierarchical(dimensions)
    plan = DimensionPlan.near(hosts) if isinstance(dimensions, str) else DimensionPlan.grid(dimensions)

    def body(transport: virtual.VirtualTransport) -> tuple[Tensor, Tensor, list[int]]:
        route = topology.route(transport, 1)
        state: State = {}
        totals, residual = torch.zeros(elements), torch.zeros(elements)
        for block in given:
            x = block[transport.world.rank].clone()
            total, state = finish(route.exchange(Coarse(), x, Layout.vector(elements), state))
            assert torch.equal(total, total.round())
            totals += total
        begin, end = plan.shard(transport.world.rank, elements)
        if begin < end:
            assert state["residual"].shape == (end - begin,)
            residual[begin:end] = state["residual"]
        else:
            assert state == {}
        return totals, residual, [begin, end]

    results = everywhere(hosts, body)
    assert all(torch.equal(totals, results[0][0]) for totals, _, _ in results)
    assert torch.equal(results[0][0] + sum(residual for _, residual, _ in results), given.sum((0, 1)))


@pytest.mark.parametrize(("dimensions", "hosts"), SHAPES)
def test_every_exchange_has_as_many_stages(dimensions: Any, hosts: list[str]) -> None:
    """Else who owns nothing of a chunk would overtake the chunk ahead of it on the way back."""

    def body(transport: virtual.VirtualTransport) -> tuple[set[int], int]:
        route = Hierarchical(dimensions).route(transport, 1)
        exchanges = [route.exchange(Dense(), torch.zeros(n), Layout.vector(n), {}) for n in (1, 2, 3, 1000)]
        return {sum(1 for _ in steps) for steps in exchanges}, route.stages

    found = everywhere(hosts, body)
    assert all(pair == ({found[0][1]}, found[0][1]) for pair in found)


def test_plans() -> None:
    assert DimensionPlan.grid((2, 2, 2)).levels == (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        [[0, 2], [1, 3], [4, 6], [5, 7]],
        [[0, 4], [1, 5], [2, 6], [3, 7]],
    )
    assert DimensionPlan.grid((1, 3, 1)).levels == ([[0, 1, 2]],)
    assert DimensionPlan.near("abab").levels == ([[0, 2], [1, 3]], [[0, 1], [2, 3]])
    assert DimensionPlan.near("aaaabbc").levels == ([[0, 1, 2, 3], [4, 5], [6]], [[0, 4, 6], [1], [2], [3], [5]])
    for one in ("aaa", "abc", "a"):
        assert DimensionPlan.near(one).levels == ([list(range(len(one)))],)


def test_alone() -> None:
    x = torch.randn(7)
    for dimensions in ("hosts", (1,), (1, 1)):
        topology = Hierarchical(dimensions)  # type: ignore[arg-type]
        assert torch.equal(total_of(topology, SoloTransport(), x.clone(), Dense()), x)
        assert topology.bytes_sent(Dense(), Layout.vector(7), ["h"], 0) == 0


@pytest.mark.parametrize("dimensions", ["racks", (), (0, 2), (2.0, 2), ("hosts",), None, 4])
def test_dimensions_that_make_no_sense(dimensions: Any) -> None:
    with pytest.raises(RuleError, match="dimensions must be"):
        Hierarchical(dimensions)


def test_other_refusals() -> None:
    with pytest.raises(RuleError, match="chunks must be"):
        Hierarchical(chunks=0)
    with pytest.raises(RuleError, match="dimensions 4 x 2 make 8 workers, and there are 3"):
        Hierarchical((4, 2)).bytes_sent(Dense(), Layout.vector(3), "abc", 0)
    assert Hierarchical([4, 2]) == Hierarchical((4, 2))  # type: ignore[arg-type]
    assert "4 x 2" in Hierarchical((4, 2)).describe(8) and "host" in Hierarchical().describe(8)
