# SPDX-License-Identifier: Apache-2.0
"""Who is to blame, from what everybody says."""

from __future__ import annotations

import json

import pytest

from paceline.communication.ring.failure_cause import BreakNotice, FailedOperation, missing_members
from paceline.communication.ring.wire import COLLECTIVE
from paceline.errors import MismatchError

CASE = FailedOperation("all_reduce", "all", 8, COLLECTIVE, 0, (0, 1, 2))


def notice(begun: int, *waits: str) -> BreakNotice:
    """Of a worker that has begun so many operations."""
    return BreakNotice("nothing moved", (), False, {"all": begun}, waits, CASE)


@pytest.mark.parametrize(
    ("notices", "silent", "behind"),
    [
        ({2: notice(8, "all")}, [1], []),
        ({2: notice(7, "all")}, [1], []),  # it waits for the silent one, at an exchange before this
        ({2: notice(7)}, [1], [2]),
        ({2: notice(7, "part")}, [1], [2]),
        ({1: notice(6), 2: notice(7, "all")}, [], [1]),
        ({1: notice(7), 2: notice(7)}, [], [1, 2]),
        ({1: notice(7, "all"), 2: notice(7, "all")}, [], [1, 2]),
        ({1: notice(8), 2: notice(8)}, [], []),
    ],
)
def test_a_worker_that_waits_at_an_earlier_exchange_is_not_blamed(
    notices: dict[int, BreakNotice], silent: list[int], behind: list[int]
) -> None:
    assert missing_members(CASE, 0, notices) == (silent, behind)


def test_notices_survive_json() -> None:
    said = notice(7, "all", "part")
    assert BreakNotice.read(json.loads(json.dumps(said.note())), 3) == said
    with pytest.raises(MismatchError, match="a malformed notice"):
        BreakNotice.read({**said.note(), "waits": None}, 3)
