# SPDX-License-Identifier: Apache-2.0
"""How much of this machine others use while a program is timed: a step that shares its cores is slower than alone."""

from __future__ import annotations

import os
import time

MUCH = 0.15
"""From this share of all cores on, it is said."""


class OtherProcesses:
    """Used as `with Others() as others:` around the timing.

    Attributes:
        cores: that other processes used on average; None where the system does not say.
        all_cores: of this machine.
    """

    def __init__(self) -> None:
        self.cores: float | None = None
        self.all_cores = os.cpu_count() or 1

    def __enter__(self) -> OtherProcesses:
        self._since, self._busy, self._own = time.monotonic(), _busy_s(), _processing_s()
        return self

    def __exit__(self, *_: object) -> None:
        now, seconds = _busy_s(), time.monotonic() - self._since
        if now is not None and self._busy is not None and seconds > 0:
            self.cores = max(0.0, (now - self._busy - (_processing_s() - self._own)) / seconds)

    @property
    def note(self) -> str:
        """What to tell people; "" where there is nothing to tell."""
        if self.cores is None or self.cores < MUCH * self.all_cores:
            return ""
        return (
            f"this machine is busy: other processes used {self.cores:.1f} of its {self.all_cores} cores while the "
            "steps were timed, so they may be faster alone; time them again when it is idle"
        )


def _processing_s() -> float:
    """Processor time of this process and of those that it has started and that are over."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_s() -> float | None:
    """Processor time of all processes since the machine was started."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(word) for word in file.readline().split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _waiting, *interrupts = fields
    return (user + nice + system + sum(interrupts[:2])) / os.sysconf("SC_CLK_TCK")
