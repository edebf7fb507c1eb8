# SPDX-License-Identifier: Apache-2.0
"""Whether any worker of a run has attached: a file in the log directory, by which the launcher sees it.

N copies of a program that never attached have each done the whole job, and nobody asked for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

NAME = ".attached"
HELP = {"-h", "--help", "--version"}


def note() -> None:
    """This process attaches; the launcher, if there is one, hears of it."""
    log = os.environ.get("PACELINE_LOG")
    if log:
        with contextlib.suppress(OSError):  # a full or removed directory ends no run
            Path(log, NAME).touch()


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether a program with these arguments says something of itself and ends."""
    return not HELP.isdisjoint(arguments)


def missing(directory: Path) -> bool:
    """Whether nobody has attached, as far as can be seen."""
    return directory.is_dir() and not (directory / NAME).exists()
