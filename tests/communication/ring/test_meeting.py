# SPDX-License-Identifier: Apache-2.0
"""How workers find each other's listeners over a store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline.communication import connect, virtual
from paceline.communication.ring import meeting
from paceline.communication.torch import rendezvous
from paceline.core.world import World
from paceline.errors import PeerLostError, UnsupportedError
from tests.communication.connections import SOON
from tests.communication.ring.rings import world_of


def test_all_workers_get_all_values() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        worlds = [world_of(rank, 3) for rank in range(3)]
        found = list(pool.map(lambda world: meeting._share(store, "here", world, [world.rank, "x"], SOON), worlds))
    assert found == [[[0, "x"], [1, "x"], [2, "x"]]] * 3


def test_missing_workers_are_named() -> None:
    store = dist.HashStore()
    store.set("here/1", "1")
    with pytest.raises(PeerLostError, match=r"^rank 2 on h2 did not come to the meeting within 0\.2 s"):
        meeting._share(store, "here", world_of(0, 3), 0, 0.2)


def test_a_value_that_is_too_long() -> None:
    store = dist.HashStore()
    store.set("here/0", "1" * 5000)
    with pytest.raises(UnsupportedError, match="rank 0 on h0 says 5000 bytes of itself at here"):
        meeting._share(store, "here", world_of(1, 2), 0, SOON)


def test_an_address_that_the_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host of the meeting knows itself by a loopback address only, the others come over an interface."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    asked: list[Any] = []

    def own(towards: str) -> str:
        asked.append(towards)
        return "127.0.0.1" if towards == "127.0.0.1" else "10.0.0.1"

    monkeypatch.setattr(rendezvous, "own_address", own)
    world = World(0, 2, 0, 1, "a", ("a", "b"))
    assert rendezvous.find_address(world, lambda value: [value, "10.0.0.2"]) == "10.0.0.1"
    assert asked == ["127.0.0.1", "10.0.0.2"]
    assert rendezvous.find_address(world, lambda value: [value, "127.0.0.1"]) == "127.0.0.1"


def test_without_a_launcher_it_is_a_cluster_of_one() -> None:
    assert connect(SOON, None, "channel").world.size == 1
    with pytest.raises(UnsupportedError, match='transport="channel" needs a launcher or a group, and RANK'):
        meeting.meet(SOON)


def test_virtual_workers_stay_virtual() -> None:
    assert virtual.run(2, lambda: connect(SOON, None, "channel").name) == ["virtual", "virtual"]


def test_transports_that_there_are_not() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(UnsupportedError, match=r"transport must be one of auto, channel(, mpi)?, got 'gloo'"):
        paceline.attach(model, torch.optim.SGD(model.parameters()), transport="gloo")
