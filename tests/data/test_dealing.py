# SPDX-License-Identifier: Apache-2.0
"""An epoch that is split in stages, each among another number of workers."""

from __future__ import annotations

from collections import Counter

import pytest

from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.dealing import Dealt, DealtAssignment, Turn, done_in_stages, stages_of
from paceline.data.sampling.position import Position
from paceline.data.sampling.split import Split, split_of

KINDS = ["rounds", "stripes"]


def dealt(kind: str, total: int, unit: int, turns: list[Turn], workers: int = 8) -> Dealt:
    def split(places: int, number: int) -> Split:
        return split_of((kind, places, unit, number))

    return Dealt(stages_of(turns, Ranges([(0, total)]), split), split(total, workers))


def given(parts: Dealt, rank: int, first: int = 0) -> list[list[int]]:
    """The places of each batch of a worker."""
    assignment = DealtAssignment(0, parts, rank, lambda rank, workers: rank, first)
    found = []
    while (portion := assignment.next(wait=True)) is not None:
        found.append([place for begin, end in portion.places for place in range(begin, end)])
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("total", [7, 64, 131, 1000])
@pytest.mark.parametrize("turns", [[(0, 2)], [(0, 1), (2, 3)], [(0, 2), (1, 4), (2, 8)], [(0, 1), (3, 2), (3, 8)]])
def test_every_place_is_in_one_batch(kind: str, total: int, turns: list[Turn]) -> None:
    parts = dealt(kind, total, 3, turns)
    batches = [given(parts, rank) for rank in range(8)]
    assert Counter(place for one in batches for batch in one for place in batch) == dict.fromkeys(range(total), 1)
    assert max(map(len, batches)) <= len(parts)
    assert parts.places(len(parts)) == total and parts.share(len(parts)) == 1.0


def test_by_hand() -> None:
    """Two rounds of one worker, then what remains in rounds of three; the last is cut to equal sizes."""
    parts = dealt("rounds", 20, 2, [(0, 1), (2, 3)], 4)
    assert given(parts, 0) == [[0, 1], [2, 3], [4, 5], [10, 11], [16, 17]]
    assert given(parts, 1) == [[6, 7], [12, 13], [18]]
    assert given(parts, 2) == [[8, 9], [14, 15], [19]]
    assert given(parts, 1, first=3) == given(parts, 1)[1:]
    assert [parts.places(n) for n in range(6)] == [0, 2, 4, 10, 16, 20]
    assert [parts.fixed_rounds(n, 4) for n in range(6)] == [0, 0, 0, 1, 2, 3]  # of 8, 8 and 4 places


@pytest.mark.parametrize("kind", KINDS)
def test_what_remains_for_another_number_of_workers(kind: str) -> None:
    """Workers 0 and 1 have entered three rounds, worker 2, which began at the second, has entered them all."""
    parts = dealt(kind, 60, 2, [(0, 2), (2, 3)])
    done = done_in_stages(parts.stages, [3, 3, 3])
    expected = [place for rank in range(3) for batch in given(parts, rank)[: 3 if rank < 2 else 1] for place in batch]
    assert done == Ranges([(place, place + 1) for place in sorted(expected)])


def test_a_position_keeps_its_turns() -> None:
    position, other = Position(), Position()
    position.begin()
    position.now.cut, position.now.turns, position.now.batches = ("rounds", 60, 2, 2), [(0, 2), (2, 3)], 3
    position.entered(0, 3)
    other.load(position.state())
    assert other.now.turns == position.now.turns and other.begin() == 3
    alone = Position()
    waiting = {**position.state(), "passes": [[0, None, 0, 0, position.now.shard_progress.state(), [[0, 2], [2, 3]]]]}
    alone.regroup([position.state(), position.state(), position.state(), waiting], None, 0)
    assert alone.rest[0] == Ranges([(14, 60)])
