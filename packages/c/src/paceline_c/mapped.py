# SPDX-License-Identifier: Apache-2.0
"""Which memory this process has: a wrong pointer or size is found before anything reads there."""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from pathlib import Path

LINE = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) rw", re.MULTILINE)
"""Memory that can be read and written, in Linux's list."""


def writable(text: str) -> list[tuple[int, int]]:
    """(begin, end) of each stretch of writable memory, from the text of /proc/self/maps; neighbours are one."""
    found: list[tuple[int, int]] = []
    for begin, end in ((int(first, 16), int(last, 16)) for first, last in LINE.findall(text)):
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def check(arrays: Sequence[tuple[str, int, int]]) -> None:
    """Refuse arrays, given as (name, address, bytes), that do not lie in writable memory of this process.

    Raises:
        ValueError: one does not.
    """
    try:
        stretches = writable(Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace"))
    except OSError:  # no such list here
        return
    for name, address, size in arrays:
        place = bisect.bisect_right(stretches, (address, 1 << 64)) - 1
        begin, end = stretches[place] if place >= 0 else (0, 0)
        if size and not begin <= address < address + size <= end:
            raise ValueError(
                f"{name} at {address:#x} with {size:,} bytes does not lie in memory that this process can write; "
                "its pointer, its size or its dtype is wrong"
            )
