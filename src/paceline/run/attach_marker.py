# SPDX-License-Identifier: Apache-2.0
"""A file in the log directory that records that a worker has attached; the launcher checks it.

Without attaching, each of N copies of a program does the whole job.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

NAME = ".attached"
HELP = {"-h", "--help", "--version"}


def mark_attached() -> None:
    """Tell the launcher, if there is one, that this process attaches."""
    log = os.environ.get("PACELINE_LOG")
    if log:
        with contextlib.suppress(OSError):  # a full or removed directory must not end a run
            Path(log, NAME).touch()


def forget(directory: Path) -> None:
    """Remove the file of an earlier run in the same directory."""
    with contextlib.suppress(OSError):
        (directory / NAME).unlink()


def asks_for_help(arguments: Sequence[str]) -> bool:
    """Whether a program with these arguments prints its help or version and ends."""
    return not HELP.isdisjoint(arguments)


def is_missing(directory: Path) -> bool:
    """Whether no worker has attached: the directory exists without the file, and without an event log.

    A directory that was removed in the run is made again, with the logs.
    """
    return directory.is_dir() and not (directory / NAME).exists() and not any(directory.glob("rank-*.jsonl"))
