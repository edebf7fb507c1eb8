# SPDX-License-Identifier: Apache-2.0
"""Blocks by hand, and the recursion against the closed form where there is one."""

from __future__ import annotations

import pytest

from paceline.rules.schedule import EveryBlock
from paceline_plugins.forecast.planner import LogNormal
from paceline_plugins.forecast.planner.lockstep import barrier, overlapped

EVEN = LogNormal(0.1)


def test_a_barrier_by_hand() -> None:
    block = barrier(EVEN, 4, 0.3, 8)
    assert (block.compute_s, block.wait_s, block.exchange_s) == (0.4, 0.0, 0.3)
    assert block.total_s == pytest.approx(0.7)


def test_behind_the_next_block_what_fits_is_hidden() -> None:
    """An exchange that takes 3 of 4 steps costs nothing; one of 6 steps costs what does not fit."""
    schedule = EveryBlock(period=4, overlap=4)
    assert overlapped(schedule, EVEN, 0.3, 8).total_s == pytest.approx(0.4)
    assert overlapped(schedule, EVEN, 0.6, 8).total_s == pytest.approx(0.6)
    assert overlapped(schedule, EVEN, 0.6, 8).exchange_s == pytest.approx(0.2)


def test_stragglers_without_overlap_are_the_closed_form() -> None:
    """The recursion with an overlap of nothing is a barrier: the same mean, within what chance does."""
    steps = LogNormal(0.1, 0.3)
    run = overlapped(EveryBlock(period=4, overlap=0), steps, 0.05, 16)
    assert run.total_s == pytest.approx(barrier(steps, 4, 0.05, 16).total_s, rel=0.02)
