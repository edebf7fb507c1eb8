# SPDX-License-Identifier: Apache-2.0
"""At which address a worker listens; meetings of real processes are in test_socket_service.py."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from paceline.communication import Transport
from paceline.communication.torch import rendezvous as store_rendezvous
from paceline.core.world import World
from paceline.errors import UnsupportedError
from paceline.update.server import rendezvous

FAR, NEAR = "10.0.0.1", "10.0.0.2"


class Said:
    """A transport on which the others have these addresses."""

    def __init__(self, hosts: tuple[str, ...], others: list[str]) -> None:
        self.world, self._others = World(0, len(hosts), 0, 1, hosts[0], hosts), others

    def gather_json(self, value: Any) -> list[Any]:
        return [value, *self._others]


@pytest.mark.parametrize(
    ("master", "others", "wanted"),
    [
        ("127.0.0.1", ["127.0.0.1"], "127.0.0.1"),  # all on one machine, whatever its names
        ("node0", [FAR], NEAR),
        ("127.0.0.1", [FAR], NEAR),  # the host of rank 0 knows itself by its loopback only
        (None, ["127.0.0.1"], NEAR),  # a group that the user made: towards another host
    ],
)
def test_the_address(monkeypatch: pytest.MonkeyPatch, master: str | None, others: list[str], wanted: str) -> None:
    asked = []

    def own_address(towards: str) -> str:
        asked.append(towards)
        return "127.0.0.1" if towards == "127.0.0.1" else NEAR

    monkeypatch.setattr(store_rendezvous, "own_address", own_address)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    said = Said(("a", "b"), others)
    assert store_rendezvous.find_address(said.world, said.gather_json) == wanted
    assert asked[-1] == (FAR if master == "127.0.0.1" and FAR in others else master or "b")


def test_where_no_way_leads_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(towards: str) -> str:
        raise UnsupportedError(f"there is no way from here to {towards!r}")

    monkeypatch.setattr(store_rendezvous, "own_address", nowhere)
    with pytest.raises(UnsupportedError, match=r"'b'; set MASTER_ADDR to an address of rank 0's host"):
        store_rendezvous.find_address(Said(("a", "b"), []).world, Said(("a", "b"), []).gather_json)
    assert store_rendezvous.find_address(Said(("a", "a"), []).world, Said(("a", "a"), []).gather_json) == "127.0.0.1"


class Threads:
    """Two workers of one process, as far as a meeting needs them."""

    def __init__(self, rank: int, said: list[dict[int, Any]], together: threading.Barrier) -> None:
        self.world = World(rank, 2, rank, 2, "a", ("a", "a"))
        self._said, self._together, self._turn = said, together, 0

    def gather_json(self, value: Any) -> list[Any]:
        self._said[self._turn][self.world.rank] = value
        self._together.wait(20)
        self._turn += 1
        return [self._said[self._turn - 1][rank] for rank in range(2)]

    def sent(self, nbytes: int) -> None:
        """Counted elsewhere."""


def test_frames_may_take_as_long_as_the_user_says() -> None:
    """A large frame over a slow link takes minutes, and its sender is alive."""
    said: list[dict[int, Any]] = [{} for _ in range(4)]
    together, found = threading.Barrier(2), {}

    def work(rank: int) -> None:
        found[rank] = rendezvous.connect_all(cast(Transport, Threads(rank, said, together)), 300.0, None)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    channels = [channel for way in found.values() for side in way for channel in side.values()]
    assert [channel.stall_s for channel in channels] == [300.0] * 4
    for channel in channels:
        channel.close()
