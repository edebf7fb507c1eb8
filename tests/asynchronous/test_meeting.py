# SPDX-License-Identifier: Apache-2.0
"""At which address a worker listens; meetings of real processes are in test_threads.py."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.asynchronous import meeting
from paceline.errors import UnsupportedError
from paceline.world import World

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

    monkeypatch.setattr(meeting, "own_address", own_address)
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    assert meeting.find_address(Said(("a", "b"), others)) == wanted
    assert asked[-1] == (FAR if master == "127.0.0.1" and FAR in others else master or "b")


def test_where_no_way_leads_it_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(towards: str) -> str:
        raise UnsupportedError(f"there is no way from here to {towards!r}")

    monkeypatch.setattr(meeting, "own_address", nowhere)
    with pytest.raises(UnsupportedError, match=r"'b'; set MASTER_ADDR to an address of rank 0's host"):
        meeting.find_address(Said(("a", "b"), []))
    assert meeting.find_address(Said(("a", "a"), [])) == "127.0.0.1"
