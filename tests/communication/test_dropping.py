# SPDX-License-Identifier: Apache-2.0
"""Groups of torch.distributed that are dropped while an operation on them is in flight."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from paceline.communication.torch import groups
from paceline.communication.torch.groups import Connection, GroupHolder
from paceline.errors import ClosedError

LONG_S = 600.0
SOON_S = 60.0


class Handle:
    """An operation that ends when the test says so."""

    over = False

    def is_completed(self) -> bool:
        return self.over


class Group:
    """Counts how many were destroyed."""

    destroyed = 0

    def __del__(self) -> None:
        Group.destroyed += 1


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(groups, "DROP_S", 0.0)
    monkeypatch.setattr(Group, "destroyed", 0)
    yield
    assert not groups._kept, "a test left a group"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Connection, GroupHolder]]:
    """A connection of two over gloo, both in this process, and the first one's group."""
    store = dist.HashStore()
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: store)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    both = [Connection("dropping", "gloo", rank, 2, LONG_S) for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        holders = [future.result(SOON_S) for future in [pool.submit(one.open, "all", [0, 1]) for one in both]]
    yield both[0], holders[0]
    for one in both:  # what is in flight fails, when the other worker's sockets close
        one.close()
    monkeypatch.setattr(groups, "DROP_S", SOON_S)
    groups.drop_groups([])


def sum_of(group: Any) -> Any:
    return group.allreduce([torch.zeros(1)], dist.AllreduceOptions())


def descriptors() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_group_is_kept_until_its_operations_have_ended() -> None:
    handles = [Handle(), Handle()]
    groups.drop_groups([(Group(), []), (Group(), list(handles))])
    assert Group.destroyed == 1
    handles[0].over = True
    groups.drop_groups([])
    assert Group.destroyed == 1, "one of its operations is in flight"
    handles[1].over = True
    groups.drop_groups([])
    assert Group.destroyed == 2


def test_a_closed_connection_leaves_no_socket_and_no_thread(opened: tuple[Connection, GroupHolder]) -> None:
    connection, holder = opened
    threads, before = threading.active_count(), descriptors()
    del holder
    connection.close()
    assert descriptors() < before and threading.active_count() <= threads


def test_a_thread_that_starts_an_operation_does_not_wait_for_it(opened: tuple[Connection, GroupHolder]) -> None:
    """It held the last reference to a group that another thread had dropped, and waited for the deadline."""
    connection, holder = opened
    begun, release = threading.Event(), threading.Event()

    def begin(group: Any) -> Any:
        handle = sum_of(group)  # the other worker never comes
        begun.set()
        assert release.wait(SOON_S)
        return handle

    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(connection.start, holder, "all_reduce", begin, None, True)
        assert begun.wait(SOON_S)
        connection.close()
        release.set()
        with pytest.raises(ClosedError, match="closed before"):
            starting.result(SOON_S)
    assert len(groups._kept) == 1


def test_a_part_that_is_closed_with_an_operation_in_flight(opened: tuple[Connection, GroupHolder]) -> None:
    connection, holder = opened
    pending = connection.start(holder, "all_reduce", sum_of, None, collective=True)
    connection.drop([holder])
    with pytest.raises(ClosedError, match="closed before"):
        pending.wait()
    with pytest.raises(ClosedError, match="closed before"):
        connection.start(holder, "all_reduce", sum_of, None, collective=True)
