# SPDX-License-Identifier: Apache-2.0
"""The command `paceline`: a folder or a file for each of its commands.

::

    run/         `paceline run`: options, checks, elastic runs, what workers print, how it ended
    launch/      starts workers, watches them, ends them; for `run` and `tune --search`
    tune/        `paceline tune`, and a search over whole runs
    plan/        `paceline plan`
    report, watch, trace, explain, data, sim, doctor   a command each
    console      where all of them print, and how they refuse
"""

from __future__ import annotations

from paceline.cli.main import app

__all__ = ["app"]
