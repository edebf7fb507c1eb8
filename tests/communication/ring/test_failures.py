# SPDX-License-Identifier: Apache-2.0
"""Workers that are lost, late, or cancelled: everybody hears of it, at once, and by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from paceline.communication.ring import RingTransport
from paceline.communication.ring.wire import DATA, GRANT, sequence_id
from paceline.errors import PeerLostError
from tests.communication.connections import SOON
from tests.communication.ring.rings import everywhere, ring

SHORT = 1.0


def reduce(t: RingTransport, numel: int = 100_000) -> str:
    """How it fails."""
    with pytest.raises(PeerLostError) as caught:
        t.all_reduce(torch.ones(numel)).wait()
    return str(caught.value)


def failures(
    members: list[RingTransport], rank: int, act: Callable[[RingTransport], Any], numel: int = 100_000
) -> list[str]:
    """How all others fail when one acts as soon as nobody is in the barrier any more."""
    together = threading.Barrier(len(members))

    def body(t: RingTransport) -> str:
        t.barrier()
        together.wait(SOON)
        if t.world.rank != rank:
            return reduce(t, numel)
        act(t)
        return ""

    return everywhere(members, body)


@pytest.mark.parametrize("numel", [10, 100_000])
def test_all_name_the_worker_whose_connections_close(numel: int) -> None:
    """Also by those who are not its neighbours in the ring."""
    with ring(5) as members:
        found = failures(members, 2, lambda t: t._connections.cut(), numel)
        for rank in (0, 1, 3, 4):
            assert "rank 2 on h2 is lost" in found[rank], found[rank]
            assert found[rank].endswith(f"[rank {rank} of 5 on h{rank}]")
            assert members[rank].lost == {2}


def test_one_that_left_before_is_named_at_the_next_operation() -> None:
    with ring(3) as members:
        found = failures(members, 1, RingTransport.close)
        for rank in (0, 2):
            assert "Rank 1 on h1 has ended its run" in found[rank]
            assert members[rank].lost == {1}


def test_all_name_the_missing_worker_after_the_deadline() -> None:
    """It answers, and says that it has not come; the others all wait for one another."""
    over = threading.Event()

    def body(t: RingTransport) -> str:
        t.barrier()
        if t.world.rank == 3:
            assert over.wait(SOON)
            return reduce(t)
        found = reduce(t)
        over.set()
        return found

    with ring(4, timeout_s=SHORT) as members:
        found = everywhere(members, body)
        for rank in range(3):
            assert "rank 3 on h3 did not come to it" in found[rank], found[rank]
            assert "exchange 2 (all_reduce, deadline 1 s)" in found[rank]
            assert members[rank].lost == {3}
        assert "this worker did not come to it" in found[3] or "gave this worker up" in found[3]


def test_a_message_that_is_never_sent() -> None:
    def body(t: RingTransport) -> str:
        t.barrier()
        if t.world.rank == 1:
            return ""
        with pytest.raises(PeerLostError) as caught:
            t.receive(torch.empty(3), 1).wait()
        return str(caught.value)

    with ring(2, timeout_s=SHORT) as members:
        found = everywhere(members, body)
        assert "exchange 1 (receive from rank 1 on h1, deadline 1 s) failed: rank 1 on h1 did not come" in found[0]
        assert "this worker did not come to it" in reduce(members[1])


def test_one_that_was_never_there() -> None:
    with ring(3, timeout_s=SHORT) as members:
        members[2].close()
        found = everywhere(members[:2], reduce)
    assert all("rank 2 on h2" in text for text in found)


def test_progress_counts_not_time() -> None:
    """Nobody is given up while something moves."""

    def body(t: RingTransport) -> float:
        x = torch.ones(3)
        for _ in range(20):
            t.all_reduce(x).wait()
            threading.Event().wait(SHORT / 10)
        return float(x[0])

    with ring(2, timeout_s=SHORT) as members:
        assert everywhere(members, body) == [2.0**20] * 2


def test_cancel_ends_operations_in_flight_and_later_ones() -> None:
    with ring(3) as members:
        for one in members:
            one.open_channels(2)
        one = members[0]
        pending = [one.all_reduce(torch.ones(100_000)), one.channel(1).all_gather(torch.ones(3, 2), torch.ones(2))]
        pending += [one.all_reduce(torch.ones(5)) for _ in range(20)]
        one.cancel("worker 7 is new")
        for operation in pending:
            with pytest.raises(PeerLostError, match=r"^worker 7 is new \[rank 0 of 3 on h0\]$"):
                operation.wait()
        with pytest.raises(PeerLostError, match="worker 7 is new"):
            one.part([[0, 1, 2]]).barrier()
        assert one.lost == frozenset() and not one._connections._operations
        assert "rank 0 on h0 broke off: worker 7 is new" in reduce(members[1])
        assert members[1].lost == frozenset()


def test_nothing_is_written_after_an_error() -> None:
    """Whoever does an exchange again finds what he brought."""
    with ring(2) as members:
        x = torch.ones(100_000)
        pending = members[0].all_reduce(x)
        members[0].cancel("again")
        with pytest.raises(PeerLostError):
            pending.wait()
        assert "again" in reduce(members[1])
        assert torch.equal(x, torch.ones(100_000))


def test_operations_that_do_not_belong_together() -> None:
    def body(t: RingTransport) -> str:
        if t.world.rank == 0:
            return reduce(t, 100_000)
        with pytest.raises(PeerLostError) as caught:
            t.broadcast(torch.ones(100_000), 0).wait()
        return str(caught.value)

    with ring(2) as members:
        found = everywhere(members, body)
    assert any("does something else than" in text for text in found), found
    assert all("is lost" in text or "gave this worker up" in text for text in found), found


@pytest.mark.parametrize(
    ("kind", "numbers", "nbytes", "says"),
    [
        (99, (), 0, "a frame of kind 99"),
        (DATA, (5, 1, 0, 0, 0, 0), 1 << 15, "32768 bytes of data come that no receive has asked for"),
        (DATA, (5, 1, 1, 0, 0, 0), 10, "10 bytes of data come that no receive has asked for"),
        (DATA, (5, 1, 2, 0, 0, 0), 10, "for an operation of role 2"),
        (DATA, (5, 0, 0, 0, 0, 0), 10, "for exchange 0, which is over"),
        (
            DATA,
            (sequence_id("all"), 1, 0, 0, 0, 0),
            10,
            "for exchange 1, which is over|at exchange 1 of all it does something else",
        ),
        (GRANT, (5, 1, 0, 0), 10, "with data"),
        (DATA, (5, 1, 0, 0), 0, "without data"),
        (DATA, (5, 1, 0, 0), 1 << 22, "a body of 4194304 bytes is announced, the limit of this channel is 2097152"),
        (4, (), 0, "it breaks off with a malformed notice"),
    ],
)
def test_frames_that_make_no_sense(kind: int, numbers: tuple[int, ...], nbytes: int, says: str) -> None:
    def send(t: RingTransport) -> None:
        body = torch.zeros(nbytes, dtype=torch.uint8) if nbytes else None
        t._connections._links[0]._channel.send(kind, numbers, body, "?" if kind == 4 else None)

    with ring(3) as members:
        found = failures(members, 1, send)
        assert "rank 1 on h1 is lost" in found[0] and any(one in found[0] for one in says.split("|")), found[0]
        assert "rank 1 on h1 is lost" in found[2]


def test_unmatched_pieces_are_bounded() -> None:
    """A worker that makes up exchanges is cut off before it has filled the memory."""

    def send(t: RingTransport) -> None:
        piece = torch.zeros(1 << 14, dtype=torch.uint8)
        with pytest.raises(PeerLostError):
            for k in range(1, 1 << 20):
                t._connections._links[0]._channel.send(DATA, (5, k, 0, 0, 0, 0), piece)

    with ring(2) as members:
        assert "wait for exchanges that have not begun here" in failures(members, 1, send)[0]
        assert members[0]._connections._unmatched._bytes[1] == 0


def test_a_piece_that_arrives_twice() -> None:
    def send(t: RingTransport) -> None:
        numbers = (sequence_id("all"), 2, 0, 0, 0, 0)
        for _ in range(2):
            t._connections._links[0]._channel.send(DATA, numbers, torch.zeros(8, dtype=torch.uint8))

    with ring(2) as members:
        assert "is lost" in failures(members, 1, send, numel=2)[0]
