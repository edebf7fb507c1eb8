# SPDX-License-Identifier: Apache-2.0
"""How often all are started again, without starting anybody."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from paceline.cli.launch.launch import Outcome
from paceline.cli.launch.spawn import Command
from paceline.cli.run.fixed import SUCCESS_S, launch_with_restarts

FAILED, WELL = Outcome({1: 7}), Outcome()


def starts(most: int, story: list[tuple[Outcome, float]]) -> tuple[Outcome, list[int]]:
    """What comes of launches that end so, after so many seconds; and the number that each of them had."""
    seen, now, left = [], [0.0], list(story)

    def launch(command: Command) -> Outcome:
        seen.append(command.start)
        outcome, seconds = left.pop(0)
        now[0] += seconds
        return outcome

    return launch_with_restarts(most, Command([], {}, Path()), launch, lambda outcome: None, lambda: now[0]), seen


@pytest.mark.parametrize(("most", "wanted"), [(0, [0]), (2, [0, 1, 2])])
def test_so_often_and_no_more(most: int, wanted: list[int]) -> None:
    assert starts(most, [(FAILED, 1.0)] * 9) == (FAILED, wanted)


def test_what_ends_well_ends() -> None:
    assert starts(5, [(FAILED, 1.0), (WELL, 1.0), (FAILED, 1.0)]) == (WELL, [0, 1])


def test_restarts_are_counted_anew_after_an_hour_of_success() -> None:
    story = [(FAILED, 1.0), (FAILED, SUCCESS_S + 1.0), (FAILED, 1.0), (WELL, 1.0)]
    assert starts(1, story) == (FAILED, [0, 1, 2])


def test_a_signal_and_a_start_that_never_was_end_it() -> None:
    stopped, unmet = Outcome(stopped_by=Mock()), Outcome(error=TimeoutError())
    assert starts(3, [(stopped, 1.0)]) == (stopped, [0])
    assert starts(3, [(unmet, 1.0)]) == (unmet, [0])
    elsewhere = Outcome(error=RuntimeError("worker 9 failed"), workers=[Mock()])
    assert starts(1, [(elsewhere, 1.0), (WELL, 1.0)]) == (WELL, [0, 1])
