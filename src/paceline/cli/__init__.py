# SPDX-License-Identifier: Apache-2.0
"""The command `paceline`: a folder or a file for each of its commands.

::

    run/         `paceline run`: options, checks, runs of a fixed size, the workers' output, the final messages
    launch/      starts, watches and stops workers; for `run` and `tune --search`
    sim, watch, explain   a command each; other commands are plugins, result by entry points
    console/     the consoles of all commands, and how they refuse a call
"""

from __future__ import annotations

from paceline.cli.main import app

__all__ = ["app"]
