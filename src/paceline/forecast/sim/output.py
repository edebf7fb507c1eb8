# SPDX-License-Identifier: Apache-2.0
"""What virtual workers print: worker 0 to the process's own stream, the others each to a file.

One object stands for all of them as `sys.stdout` (and one as `sys.stderr`), and asks at each call which worker it is
that calls. So a handler of `logging`, which keeps the stream that it was made with, writes to the right place, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

from paceline.communication import virtual


class WorkerStream:
    """A text stream with one end for each virtual worker.

    Args:
        own: that of worker 0, and of threads that are no worker's.
        directory: where the others' files are made, when something is first written to them.
        suffix: "out" or "err".
    """

    def __init__(self, own: TextIO, directory: Path, suffix: str) -> None:
        self._directory, self._suffix = directory, suffix
        self._ends: dict[int, TextIO] = {0: own}

    def path(self, rank: int) -> Path:
        """Where the lines of a worker go."""
        return self._directory / f"rank-{rank:03d}.{self._suffix}"

    def _end(self) -> TextIO:
        transport = virtual.current()
        rank = transport.world.rank if transport is not None else 0
        if rank not in self._ends:
            self._ends[rank] = self.path(rank).open("w", encoding="utf-8", buffering=1)
        return self._ends[rank]

    def write(self, text: str) -> int:
        """As a stream does."""
        return self._end().write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._end(), name)

    def close_all(self) -> None:
        """Close the files."""
        for rank, end in self._ends.items():
            if rank:
                end.close()
