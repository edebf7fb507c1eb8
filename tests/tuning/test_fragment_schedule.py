# SPDX-License-Identifier: Apache-2.0
"""When exchanges begin after the period has changed, by hand."""

from __future__ import annotations

import itertools

from paceline.rules.schedule import EveryBlock
from paceline.update.engine.blocks.model import FragmentSchedule


def begins(turns: FragmentSchedule, schedule: EveryBlock, count: int) -> list[int]:
    """After which steps the next exchanges begin."""
    found = []
    for _ in range(count):
        found.append(turns.ends(schedule))
        turns.begin(schedule)
    return found


def test_the_block_under_way_gets_the_new_length() -> None:
    turns, before, after = FragmentSchedule([0]), EveryBlock(4), EveryBlock(6)
    assert begins(turns, before, 2) == [4, 8]
    turns.retime(before, after, 8)
    assert begins(turns, after, 2) == [14, 20]


def test_a_block_that_is_long_enough_already_ends_at_once() -> None:
    turns, before, after = FragmentSchedule([0]), EveryBlock(9, overlap=4), EveryBlock(4, overlap=4)
    assert begins(turns, before, 1) == [9]
    turns.retime(before, after, 13)  # 4 steps after it began
    assert begins(turns, after, 3) == [13, 17, 21]
    turns = FragmentSchedule([0])
    assert begins(turns, before, 1) == [9]
    turns.retime(before, after, 15)
    assert begins(turns, after, 2) == [15, 19]


def test_a_fragment_is_not_sent_before_it_has_landed() -> None:
    before, after = EveryBlock(7, fragments=3, overlap=5), EveryBlock(5, fragments=3, overlap=5)
    turns = FragmentSchedule([0] * 3)
    starts = begins(turns, before, 4)
    turns.retime(before, after, starts[-1])
    starts += begins(turns, after, 9)
    assert all(later - sooner >= 5 for sooner, later in zip(starts, starts[3:], strict=False))
    assert all(later > sooner for sooner, later in itertools.pairwise(starts))
