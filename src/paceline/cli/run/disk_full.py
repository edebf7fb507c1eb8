# SPDX-License-Identifier: Apache-2.0
"""Says that the disk of the log directory is full: what the workers say of it may find no room there either."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

from paceline.cli.console import err, near

LOOK_EVERY_S = 5.0
ROOM_BYTES = 1 << 14


class Room:
    """Looks now and then, and says once what is wrong.

    Args:
        directory: of the logs.
        clock: seconds.
    """

    def __init__(self, directory: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self.directory, self._clock = directory, clock
        self._looked_at, self._said = float("-inf"), False

    def look(self) -> None:
        """Look, if it is time."""
        now = self._clock()
        if self._said or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        what = _missing(self.directory)
        if what:
            self._said = True
            err().print(
                f"the log directory {near(self.directory)} {what}: the run goes on, without what its logs lack now",
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
    full = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < ROOM_BYTES
    return "is on a full disk" if full else ""
