# SPDX-License-Identifier: Apache-2.0
"""Plans without sockets: a post office in one thread carries every piece, in any order of the hops."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from paceline.communication.ring import wire
from paceline.communication.ring.plans import OperationPlan, Pairwise, Piece, Ring


def carry(plans: Sequence[OperationPlan], seed: int = 0) -> Counter[tuple[int, int]]:
    """Bring every piece to its place; how many went from each to each."""
    shuffled, sent = random.Random(seed), Counter[tuple[int, int]]()
    waiting: dict[tuple[int, int], list[Piece]] = {}

    def put(rank: int, piece: Piece) -> None:
        sent[rank, piece.to] += 1
        waiting.setdefault((rank, piece.to), []).append(piece)

    for rank, plan in enumerate(plans):
        for piece in plan.first():
            put(rank, piece)
    while waiting:
        hop = shuffled.choice(sorted(waiting))
        piece = waiting[hop].pop(0)
        if not waiting[hop]:
            del waiting[hop]
        source, here = hop
        place = plans[here].place(source, piece.step, piece.nth)
        assert place is not None
        if place.adds:
            wire.add(place.view, piece.body)
        else:
            place.view.copy_(piece.body)
        further = plans[here].then(source, piece.step, piece.nth)
        if further is not None:
            put(here, further)
    for rank, plan in enumerate(plans):
        for side, count in (("out", plan.outgoing), ("in", plan.incoming)):
            for other, pieces in count.items():
                assert sent[(rank, other) if side == "out" else (other, rank)] == pieces
    return sent


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "PIECE", 64)  # 8 elements of 8 bytes


@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("numel", [1, 7, 8, 100, 203])
def test_a_ring_sums(size: int, numel: int) -> None:
    tensors = [torch.arange(numel, dtype=torch.int64) * 10**rank for rank in range(size)]
    want = torch.stack(tensors).sum(0)
    plans = [Ring(range(size), rank, x.tensor_split(size), 2 * (size - 1), size - 1) for rank, x in enumerate(tensors)]
    sent = carry(plans, seed=numel)
    assert all(torch.equal(x, want) for x in tensors)
    assert set(sent) <= {(rank, (rank + 1) % size) for rank in range(size)}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_ring_gathers(size: int) -> None:
    rows = [torch.full((size, 20), -1.0, dtype=torch.float64) for _ in range(size)]
    for rank, own in enumerate(rows):
        own[rank] = rank
    carry([Ring(range(size), rank, own.unbind(0), size - 1, 0) for rank, own in enumerate(rows)])
    assert all(
        torch.equal(own, torch.arange(float(size), dtype=torch.float64)[:, None].expand(size, 20)) for own in rows
    )


@pytest.mark.parametrize("where", [(1, 0, 0), (2, 0, 5), (2, 0, -1), (2, 6, 0), (2, -1, 0), (0, 0, 0)])
def test_pieces_that_belong_nowhere(where: tuple[int, int, int]) -> None:
    plan = Ring(range(4), 3, torch.zeros(32, dtype=torch.float64).tensor_split(4), 6, 3)
    assert plan.place(2, 0, 0) is not None
    assert plan.place(*where) is None


def test_what_is_large_waits_to_be_asked_for() -> None:
    large, small = torch.empty(wire.EAGER + 1, dtype=torch.uint8), torch.empty(wire.EAGER, dtype=torch.uint8)
    plan = Pairwise({1: large, 2: small}, {3: large, 4: small})
    assert (plan.gated, plan.grants) == ({1}, {3})
    plan = Pairwise({2: small}, {4: small}, asked=True)
    assert (plan.gated, plan.grants) == ({2}, {4})


@pytest.mark.parametrize("numel", [0, 1, 65_536, 65_537, 1_000_000, 30_000_000])
def test_pieces_grow_with_what_they_are_cut_from(numel: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    x = torch.empty(numel)
    sizes = [piece.nbytes for piece in wire.pieces_of(x)]
    assert sum(sizes) == x.nbytes and all(0 < size <= wire.PIECE for size in sizes)
    assert all(size >= wire.LEAST_PIECE for size in sizes[:-1])
    assert len(sizes) <= max(9, 1 + x.nbytes // wire.PIECE)
