# SPDX-License-Identifier: Apache-2.0
"""`paceline run --restarts N`: when a worker fails, stop all and start them again, at most N times."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from paceline.cli.console import err

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome
    from paceline.cli.launch.spawn import Command

SUCCESS_S = 3600.0
"""After so long without a failure the count of restarts begins at 0 again."""


def launch_with_restarts(
    most: int,
    command: Command,
    launch: Callable[[Command], Outcome],
    report: Callable[[Outcome], object],
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Launch until the run succeeds, is stopped, or fails after `most` restarts; `report` prints each failure."""
    used, start = 0, command.start
    while True:
        began = clock()
        outcome = launch(replace(command, start=start))
        used = 0 if clock() - began > SUCCESS_S else used
        if not _failed(outcome) or used >= most:
            return outcome
        used, start = used + 1, start + 1
        if outcome.codes:
            report(outcome)
        else:
            err().print(f"the run ended: {outcome.error}", markup=False)
        err().print(f"starting all workers again ({used} of {most} restarts)", markup=False)


def _failed(outcome: Outcome) -> bool:
    """Whether a started worker failed, here or on another host."""
    return bool(outcome.codes) or (outcome.error is not None and bool(outcome.workers))
