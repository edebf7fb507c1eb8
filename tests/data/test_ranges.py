# SPDX-License-Identifier: Apache-2.0
"""Sets of ranges do what sets of numbers do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.data.ledger.ranges import Range, Ranges

END = 40
bounds = st.tuples(st.integers(0, END), st.integers(0, END))  # begin may lie behind the end: nothing
changes = st.lists(st.tuples(st.booleans(), bounds), max_size=30)
property_test = settings(database=None, deadline=None, derandomize=True, max_examples=100)


def made(changes: list[tuple[bool, Range]]) -> tuple[Ranges, set[int]]:
    """The same history of a set of ranges and of a set of numbers, which say the same at every step."""
    ours, theirs = Ranges(), set[int]()
    for adds, (begin, end) in changes:
        numbers = set(range(begin, end))
        if adds:
            assert ours.add(begin, end) == len(numbers - theirs)
            theirs |= numbers
        else:
            assert ours.remove(begin, end) == len(numbers & theirs)
            theirs -= numbers
    return ours, theirs


def numbers_of(ranges: list[Range]) -> list[int]:
    return [number for begin, end in ranges for number in range(begin, end)]


@property_test
@given(changes)
def test_adding_and_removing(changes: list[tuple[bool, Range]]) -> None:
    ours, theirs = made(changes)
    assert numbers_of(list(ours)) == sorted(theirs)
    assert ours.total == len(theirs) and bool(ours) == bool(theirs)
    assert [number in ours for number in range(-1, END + 1)] == [number in theirs for number in range(-1, END + 1)]


@property_test
@given(changes, bounds)
def test_a_cut_counts_the_numbers_that_are_there(changes: list[tuple[bool, Range]], asked: Range) -> None:
    ours, theirs = made(changes)
    begin, end = asked
    assert numbers_of(ours.cut(begin, end)) == sorted(theirs)[begin : max(begin, end)]


@property_test
@given(changes, changes)
def test_what_one_has_and_another_has_not(one: list[tuple[bool, Range]], other: list[tuple[bool, Range]]) -> None:
    (ours, theirs), (ours_2, theirs_2) = made(one), made(other)
    before = ours.state()
    assert numbers_of(list(ours.without(ours_2))) == sorted(theirs - theirs_2)
    assert ours.state() == before


@property_test
@given(changes, st.integers(1, 12))
def test_taking_from_the_front_until_nothing_is_left(changes: list[tuple[bool, Range]], most: int) -> None:
    ours, theirs = made(changes)
    taken: list[int] = []
    while (one := ours.take(most)) is not None:
        assert 0 < one[1] - one[0] <= most
        taken += range(*one)
    assert taken == sorted(theirs)


@property_test
@given(changes)
def test_the_state_is_the_set(changes: list[tuple[bool, Range]]) -> None:
    ours, _ = made(changes)
    again = Ranges(ours.state())
    assert again == ours and again == ours.copy() and repr(again) == repr(ours)
    assert Ranges(reversed(ours.state())) == ours  # in whatever order they come
