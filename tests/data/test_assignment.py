# SPDX-License-Identifier: Apache-2.0
"""What a worker is to train on next: its part of an even split, and batches out of leases."""

from __future__ import annotations

from collections import deque

import pytest

from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Range, Ranges
from paceline.data.sampling.split import Assignment, EvenAssignment, LeasedAssignment, Portion, Rounds, Stripes, cut_up


def drain(assignment: Assignment) -> list[Portion]:
    found = []
    while (portion := assignment.next(wait=True)) is not None:
        found.append(portion)
    return found


def places(portions: list[Portion]) -> list[int]:
    return [place for portion in portions for begin, end in portion.places for place in range(begin, end)]


@pytest.mark.parametrize("kind", [Rounds, Stripes])
@pytest.mark.parametrize("rest", [[(0, 50)], [(3, 20), (25, 26), (40, 72)], [(7, 9)], []])
def test_an_even_part_of_what_is_left(kind: type, rest: list[Range]) -> None:
    left = Ranges(rest)
    parts = [drain(EvenAssignment(4, left, kind(left.total, 4, 3), rank, 0)) for rank in range(3)]
    assert sorted(places([portion for part in parts for portion in part])) == [i for one in rest for i in range(*one)]
    assert all(0 < portion.count <= 4 and portion.epoch == 4 for part in parts for portion in part)


def test_it_goes_on_at_a_round() -> None:
    rest = Ranges([(3, 20), (25, 60)])
    whole = drain(EvenAssignment(0, rest, Rounds(52, 4, 3), 1, 0))
    for first in range(len(whole) + 2):
        assert drain(EvenAssignment(0, rest, Rounds(52, 4, 3), 1, first)) == whole[first:]


def test_a_last_incomplete_round_of_batches_is_everybodys() -> None:
    """Five batches of a sampler's on two workers: the fifth is cut sample by sample."""
    parts = [drain(EvenAssignment(0, Ranges([(0, 5)]), Rounds(5, 1, 2), rank, 0, "pieces")) for rank in range(2)]
    assert [[portion.places for portion in part] for part in parts] == [
        [[(0, 1)], [(2, 3)], [(4, 5)]],
        [[(1, 2)], [(3, 4)], [(4, 5)]],
    ]
    assert [part[-1].part for part in parts] == [(0, 2), (1, 2)] and parts[0][0].part is None
    assert [list(cut_up([7, 8, 9], part[-1].part or (0, 1))) for part in parts] == [[7, 8], [9]]


class Desk:
    """A way to a ledger that writes down what is asked."""

    def __init__(self, total: int) -> None:
        self.ledger, self.total, self.asked = Ledger(), total, list[bool]()

    def ask(self, question: Question) -> Mark | None:
        self.asked.append(question.dry)
        return self.ledger.ask(0, question)


def leased(desk: Desk, unit: int = 4) -> LeasedAssignment:
    return LeasedAssignment(desk, Question(0, 0, desk.total, unit), deque())  # type: ignore[arg-type]


def test_leases_are_cut_into_batches() -> None:
    assignment = leased(desk := Desk(35))
    assignment.held.append((0, 0, 0, 22))  # one question for several batches
    desk.ledger.epochs.expect(0, 0, Ranges([(22, 35)]))
    sizes = [portion.count for portion in drain(assignment)]
    assert sizes == [4] * 5 + [2, 2, 4, 4, 3] and len(desk.asked) == 5


def test_what_comes_back_in_the_middle_of_a_batch_is_completed_up_to_its_end() -> None:
    assignment = leased(desk := Desk(20))
    desk.ledger.ask(1, Question(0, 0, 20, 4))
    desk.ledger.done(1, [(0, 0, 0, 3)])
    desk.ledger.lost(1)
    found = drain(assignment)
    assert [portion.places for portion in found][:2] == [[(3, 4)], [(4, 8)]]
    assert sorted(places(found)) == list(range(3, 20))


def test_only_who_waits_says_that_it_has_nothing_to_do() -> None:
    assignment = leased(desk := Desk(0))
    assert assignment.next(wait=False) is None and assignment.next(wait=True) is None
    assert desk.asked == [False, True]


def test_what_is_held_comes_before_a_question() -> None:
    desk = Desk(20)
    assignment = LeasedAssignment(desk, Question(0, 1, 20, 4), deque([(0, 0, 6, 9)]))  # type: ignore[arg-type]
    first, second = assignment.next(wait=True), assignment.next(wait=True)
    assert first == Portion(0, [(6, 8)]) and second == Portion(0, [(8, 9)]) and not desk.asked
