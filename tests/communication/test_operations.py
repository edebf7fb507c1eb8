# SPDX-License-Identifier: Apache-2.0
"""Channels, parts and messages on virtual workers, and alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.communication import virtual
from paceline.errors import PeerLostError
from tests.helpers import here


def test_parts_go_their_own_way() -> None:
    """One part meets three times while the other meets once; ranks, hosts and bytes are the part's own."""

    def body() -> list[Any]:
        t = here()
        part = t.part([[4, 0], [1, 2, 3]])
        x = torch.tensor([float(10**t.world.rank)])
        for _ in range(3 if part.world.size == 2 else 1):
            part.all_reduce(x).wait()
        t.barrier()
        world = part.world
        return [x.item(), world.rank, world.local_rank, world.local_size, list(world.hosts), part.bytes_sent]

    found = virtual.run(5, body, ["a", "a", "b", "a", "b"])
    assert found[4] == [4 * 10001.0, 0, 0, 1, ["b", "a"], 3 * 4]
    assert found[0] == [4 * 10001.0, 1, 0, 1, ["b", "a"], 3 * 4]
    assert found[3] == [1110.0, 2, 1, 2, ["a", "b", "a"], 2 * 4 * 2 // 3]


@pytest.mark.parametrize("groups", [[[0, 1]], [[0, 1], [1, 2]], [[0, 1, 2, 3]], [[0], [1, 2], [2]]])
def test_groups_must_cover_each_rank_once(groups: list[list[int]]) -> None:
    with pytest.raises(ValueError, match=r"groups must name each rank of 0 to 2 once"):
        virtual.run(3, lambda: here().part(groups))


def test_workers_that_name_different_groups() -> None:
    def body() -> None:
        here().part([[0, 1]] if here().world.rank else [[0], [1]])

    with pytest.raises(PeerLostError, match=r"worker 0 waits at part into \[\[0\], \[1\]\]; worker 1 waits at part"):
        virtual.run(2, body)


def test_a_subgroup_that_waits_for_a_worker_elsewhere() -> None:
    def body() -> None:
        part = here().part([[0, 1], [2]])
        if here().world.rank == 0:
            part.all_reduce(torch.zeros(3)).wait()
        else:
            here().barrier()

    with pytest.raises(
        PeerLostError,
        match=r"no worker can continue: worker 0 waits at all_reduce of 3 among workers 0, 1; worker 1 waits",
    ):
        virtual.run(3, body)


def test_messages_arrive_in_order_in_any_order_of_waits() -> None:
    def body() -> list[float]:
        t = here()
        if t.world.rank == 0:
            x = torch.tensor([1.0])
            t.send(x, 1).wait()
            x.fill_(2.0)  # what was sent is not what becomes of x
            t.send(x, 1).wait()
            back = torch.empty(1)
            t.receive(back, 2).wait()
            return [float(back), t.bytes_sent]
        if t.world.rank == 1:
            a, b = torch.empty(1), torch.empty(1)
            first, second = t.receive(a, 0), t.receive(b, 0)
            second.wait()
            first.wait()
            first.wait()
            t.send(a + b, 2).wait()
            return [float(a), float(b), t.bytes_sent]
        got = torch.empty(1)
        t.receive(got, 1).wait()
        t.send(got, 0).wait()
        return [float(got), t.bytes_sent]

    assert virtual.run(3, body) == [[3.0, 8], [1.0, 2.0, 4], [3.0, 4]]


def test_two_that_wait_for_each_other_are_named() -> None:
    def body() -> None:
        t = here()
        t.receive(torch.empty(3), 1 - t.world.rank).wait()

    with pytest.raises(
        PeerLostError,
        match=r"no worker can continue: worker 0 waits at receive of 3 from worker 1; worker 1 waits at receive of 3",
    ):
        virtual.run(2, body)


def test_a_message_from_one_that_has_ended() -> None:
    def body() -> None:
        if here().world.rank == 1:
            here().receive(torch.empty(1), 0).wait()

    with pytest.raises(PeerLostError, match=r"worker 0 has ended; worker 1 waits at receive of 1 from worker 0"):
        virtual.run(2, body)


@pytest.mark.parametrize("other", [1, 2, -1])
def test_peers_that_are_no_other_worker(other: int) -> None:
    def body() -> None:
        if here().world.rank == 1:
            here().send(torch.zeros(1), other)

    with pytest.raises(ValueError, match=f"cannot send to rank {other}: name another one of 0 to 1"):
        virtual.run(2, body)


def test_sizes_must_fit() -> None:
    def body() -> None:
        here().all_to_all(torch.empty(2), torch.empty(3), [1, 1], [1, 1])

    with pytest.raises(ValueError, match=r"in_sizes must be 2 counts that add up to 3 elements, got \[1, 1\]"):
        virtual.run(2, body)

    def uneven() -> None:
        here().all_to_all(torch.empty(3), torch.empty(2), [1, 2], [1, 1])

    with pytest.raises(ValueError, match="rank 1 sent 1 elements, 2 were expected"):
        virtual.run(2, uneven)
