# SPDX-License-Identifier: Apache-2.0
"""Warn of a full disk in the launcher, since the workers' own messages may not be written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from paceline.cli.console import err, near

LOOK_EVERY_S = 5.0
MIN_FREE_BYTES = 1 << 14


class DiskWatcher:
    """Warns once if the log directory is on a full disk, or was removed."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self._clock = directory, clock
        self._looked_at, self._said = float("-inf"), False

    def look(self) -> None:
        """Check, at most every `LOOK_EVERY_S`."""
        now = self._clock()
        if self._said or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        what = _missing(self.directory)
        if what:
            self._said = True
            err().print(
                f"the log directory {near(self.directory)} {what}: the run continues with incomplete logs",
                markup=False,
                soft_wrap=True,
            )


def _missing(directory: Path) -> str:
    try:
        disk = os.statvfs(directory)
    except FileNotFoundError:
        return "was removed"
    except OSError:
        return ""
    full = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < MIN_FREE_BYTES
    return "is on a full disk" if full else ""
