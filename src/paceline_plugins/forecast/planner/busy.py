# SPDX-License-Identifier: Apache-2.0
"""Processor use of other programs while a program is timed: a step on shared cores is slower."""

from __future__ import annotations

import os
import time

MUCH = 0.15
"""Share of all cores from which on a note is given."""


class OtherProcesses:
    """Used as `with OtherProcesses() as others:` around the timing.

    Attributes:
        cores: mean number of cores that other processes used; None where the system does not say.
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
        """A note for people; "" on an idle machine."""
        if self.cores is None or self.cores < MUCH * self.all_cores:
            return ""
        return (
            f"this machine is busy: other processes used {self.cores:.1f} of its {self.all_cores} cores while the "
            "steps were timed, so they may be faster alone; time them again on an idle machine"
        )


def _processing_s() -> float:
    """Processor time of this process and its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _busy_s() -> float | None:
    """Processor time of all processes since boot."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(word) for word in file.readline().split()[1:]]
    except (OSError, ValueError):
        return None
    user, nice, system, _idle, _waiting, *interrupts = fields
    return (user + nice + system + sum(interrupts[:2])) / os.sysconf("SC_CLK_TCK")
