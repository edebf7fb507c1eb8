# SPDX-License-Identifier: Apache-2.0
"""Which side of a cut goes on."""

from __future__ import annotations

import itertools
import os
import subprocess

import pytest

from paceline.update.server.membership import Quorum, identity, is_gone, majority

SETTLE_S = 10.0


def goes_on(side: set[int], size: int, order: list[int]) -> bool:
    """Whether a side that misses the others, one after another in `order`, goes on."""
    quorum, may = Quorum(size, SETTLE_S), True
    for number, rank in enumerate(order):
        assert rank not in side
        may = quorum.missed(rank, 100.0 + 0.1 * number) and may
    return may


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_of_two_sides_of_a_cut_exactly_one_goes_on(size: int) -> None:
    """Whichever workers are on which side, and in whatever order each side misses the others."""
    everybody = set(range(size))
    for count in range(1, size):
        for side in itertools.combinations(range(size), count):
            other = everybody - set(side)
            for order in itertools.islice(itertools.permutations(sorted(other)), 6):
                for back in itertools.islice(itertools.permutations(side), 6):
                    went_on = [goes_on(set(side), size, list(order)), goes_on(other, size, list(back))]
                    assert sum(went_on) == 1, (side, other, order, back)


def test_who_is_known_to_be_gone_is_not_counted() -> None:
    """All but the last may be killed, one after another or at once."""
    quorum = Quorum(4, SETTLE_S)
    for rank in (0, 1, 2):
        quorum.gone(rank)
    assert quorum.counted == {3}
    quorum = Quorum(4, SETTLE_S)
    quorum.gone(0)
    assert quorum.missed(3, 0.0) and not quorum.missed(2, 1.0)


def test_a_majority_may_lose_more_later() -> None:
    quorum = Quorum(5, SETTLE_S)
    assert quorum.missed(3, 0.0) and quorum.missed(4, 1.0)
    assert quorum.missed(2, 30.0), "two of three"
    quorum = Quorum(5, SETTLE_S)
    assert quorum.missed(3, 0.0) and quorum.missed(4, 1.0) and not quorum.missed(2, 2.0), "two of five"


@pytest.mark.processes
def test_a_process_of_this_host_is_known_to_be_gone() -> None:
    mine = identity()
    assert mine and not majority({1}, {0, 1})
    with subprocess.Popen(["sleep", "60"]) as child:
        with open(f"/proc/{child.pid}/stat") as stat:
            theirs = [*mine[:2], str(child.pid), stat.read().rpartition(")")[2].split()[19]]
        assert not is_gone(theirs)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(theirs), "also before anybody has waited for it"
    assert is_gone([*mine[:2], str(os.getpid()), "0"]), "another process has its number now"
    assert not is_gone(["another kernel", *theirs[1:]]) and not is_gone([])


def test_the_side_of_the_lowest_rank_of_two_halves() -> None:
    assert goes_on({0}, 2, [1]) and not goes_on({1}, 2, [0])
    assert goes_on({0, 3}, 4, [2, 1]) and not goes_on({1, 2}, 4, [0, 3])


def test_who_stood_still_asks_whether_the_others_might_have_gone_on() -> None:
    assert Quorum(2, SETTLE_S).without(1) and not Quorum(2, SETTLE_S).without(0)
    assert all(Quorum(3, SETTLE_S).without(rank) for rank in range(3))
