# SPDX-License-Identifier: Apache-2.0
"""`paceline run --restarts N`: when a worker fails all are stopped and started again, so often and no more."""

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
"""After so long without a failure the restarts are counted anew."""


def started_again(
    most: int,
    command: Command,
    launch: Callable[[Command], Outcome],
    tell: Callable[[Outcome], object],
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Launch until it ends well, is stopped, or has failed once more than it may.

    Args:
        most: restarts.
        command: every worker runs.
        launch: runs it to its end, on all workers.
        tell: says what failed, before all are started again.
        clock: seconds.
    """
    used, start = 0, command.start
    while True:
        began = clock()
        outcome = launch(replace(command, start=start))
        used = 0 if clock() - began > SUCCESS_S else used
        if not _failed(outcome) or used >= most:
            return outcome
        used, start = used + 1, start + 1
        if outcome.codes:
            tell(outcome)
        else:
            err().print(f"the run ended: {outcome.error}", markup=False)
        err().print(f"all workers are started again ({used} of {most} times)", markup=False)


def _failed(outcome: Outcome) -> bool:
    """Whether a worker failed, here or on another host; who was never started has nothing to be started again."""
    return bool(outcome.codes) or (outcome.error is not None and bool(outcome.workers))
