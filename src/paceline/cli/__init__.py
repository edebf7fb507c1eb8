# SPDX-License-Identifier: Apache-2.0
"""The command `paceline`: a folder or a file for each of its commands.

::

    run/         `paceline run`: options, checks, elastic runs, the workers' output, the final messages
    blocks/      `paceline blocks`: closed tools, whose model files are merged
    launch/      starts, watches and stops workers; for `run` and `tune --search`
    tune/        `paceline tune`, and a search over whole runs
    plan/        `paceline plan`
    verify/      `paceline verify`: the receipts of a run
    ssh/         `paceline run --hosts a,b`: the launchers of other hosts
    report, watch, trace, explain, data, sim, doctor   a command each
    console/     the consoles of all commands, and how they refuse a call
"""

from __future__ import annotations

from paceline.cli.main import app

__all__ = ["app"]
