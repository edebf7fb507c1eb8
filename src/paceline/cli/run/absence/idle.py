# SPDX-License-Identifier: Apache-2.0
"""`--while-idle`: whether anybody uses this host.

It looks at three things, none of which needs a desktop:

- input at terminals and remote logins: the access times of /dev/tty* and /dev/pts/*;
- the desktop: whether logind says that its sessions are idle (GNOME and KDE tell it), where `busctl` can ask it;
- processors: the time of all processes that are not this run's, from /proc.

A host is idle when there was no input for `QUIET_S` and others use at most `BEGIN_CORES` processors. It is in use again
with new input, or when others use more than `END_CORES`. (HTCondor draws these lines in the same way.)
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

QUIET_S = 300.0
BEGIN_CORES, END_CORES = 0.3, 0.5
WINDOW_S = 30.0
LOOK_S = 2.0
LOGIN = "org.freedesktop.login1"
DESKTOP = ["busctl", "get-property", LOGIN, "/org/freedesktop/login1", f"{LOGIN}.Manager", "IdleHint"]


class IdleHost:
    """Tells whether this host is idle.

    Args:
        sessions: gives the process sessions of this run's workers.
        desktop: whether the desktop is in use; None: that is not known.
        root: of /proc and /dev.
        clock: the wall clock.
    """

    def __init__(
        self,
        sessions: Callable[[], Collection[int]],
        desktop: Callable[[], bool | None] | None = None,
        root: Path = Path("/"),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._sessions, self._desktop, self._clock = sessions, desktop or desktop_in_use, clock
        self._proc, self._dev = root / "proc", root / "dev"
        self._samples: deque[tuple[float, float, float]] = deque()  # time, busy seconds of all, and of this run
        self._idle, self._since, self._looked_at = False, 0.0, float("-inf")
        self._why = ""

    def why(self) -> str:
        """Who uses the host; "" while it is idle."""
        now = self._clock()
        if not 0 <= now - self._looked_at < LOOK_S:
            self._looked_at, self._why = now, self._look(now)
        return self._why

    def _look(self, now: float) -> str:
        quiet_s = now - self._last_input()
        quiet_enough_s = now - self._since if self._idle else QUIET_S
        others = self._others(now)
        why = ""
        if quiet_s < quiet_enough_s:
            why = f"somebody typed at a terminal {max(0.0, quiet_s):.0f} s ago"
        elif self._desktop():
            why = "its desktop is in use"
        elif others is None:
            why = f"others' use of the processors is measured for {WINDOW_S:g} s" if not self._idle else ""
        elif others > (END_CORES if self._idle else BEGIN_CORES):
            why = f"others use {others:.1f} processors"
        if not why and not self._idle:
            self._since = now
        self._idle = not why
        return why

    def _last_input(self) -> float:
        places = [*self._dev.glob("tty[0-9]*"), *self._dev.glob("pts/[0-9]*")]
        times = [0.0]
        for place in places:
            with contextlib.suppress(OSError):
                times.append(place.stat().st_atime)
        return max(times)

    def _others(self, now: float) -> float | None:
        """Processors that others use, over the last `WINDOW_S`; None as long as that is not known."""
        self._samples.append((now, self._busy(), self._own()))
        while len(self._samples) > 2 and now - self._samples[1][0] >= WINDOW_S:
            self._samples.popleft()
        then, busy, own = self._samples[0]
        if now - then < WINDOW_S:
            return None
        _, busy_now, own_now = self._samples[-1]
        return max(0.0, (busy_now - busy - (own_now - own)) / (now - then))

    def _busy(self) -> float:
        """Seconds that all processors have worked since the start of the host."""
        user, nice, system, _, _, irq, soft, *_ = (self._proc / "stat").read_text().split("\n", 1)[0].split()[1:]
        return sum(map(int, (user, nice, system, irq, soft))) / os.sysconf("SC_CLK_TCK")

    def _own(self) -> float:
        """Seconds of this launcher, its workers, and those of them that have ended."""
        sessions, own, ticks = set(self._sessions()), os.getpid(), 0
        for place in self._proc.glob("[0-9]*"):
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
                if int(place.name) == own or int(fields[3]) in sessions:
                    ticks += sum(int(number) for number in fields[11:15])
        return ticks / os.sysconf("SC_CLK_TCK")


def desktop_in_use() -> bool | None:
    """What logind says of its sessions; None where it cannot be asked."""
    if shutil.which(DESKTOP[0]) is None:
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(DESKTOP, capture_output=True, text=True, timeout=2.0, check=True).stdout.split()
        return said == ["b", "false"]
    return None
