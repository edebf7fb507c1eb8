# SPDX-License-Identifier: Apache-2.0
"""Output of virtual workers: worker 0 writes to the process's stream, every other worker to a file.

One object is `sys.stdout` (and one `sys.stderr`) for all workers, and finds the calling worker on each call. So a
`logging` handler, which keeps the stream that it was made with, writes to the right file, too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, TextIO

from paceline.communication import virtual


class WorkerStream:
    """A text stream with a target for each virtual worker.

    Args:
        own: the target of worker 0, and of threads outside of workers.
        directory: of the other workers' files, which are made on the first write.
        suffix: "out" or "err".
    """

    def __init__(self, own: TextIO, directory: Path, suffix: str) -> None:
        self._directory, self._suffix = directory, suffix
        self._targets: dict[int, TextIO] = {0: own}

    def path(self, rank: int) -> Path:
        """The file of a worker."""
        return self._directory / f"rank-{rank:03d}.{self._suffix}"

    def _target(self) -> TextIO:
        transport = virtual.current()
        rank = transport.world.rank if transport is not None else 0
        if rank not in self._targets:
            self._targets[rank] = self.path(rank).open("w", encoding="utf-8", buffering=1)
        return self._targets[rank]

    def write(self, text: str) -> int:
        return self._target().write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)

    def close_all(self) -> None:
        """Close the files."""
        for rank, target in self._targets.items():
            if rank:
                target.close()
