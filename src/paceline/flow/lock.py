# SPDX-License-Identifier: Apache-2.0
"""The lock of a directory that one launcher uses."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from paceline.errors import UnsupportedError


class Lock:
    """Held by the one launcher of a directory, until its process ends; `name` is the lock's file.

    Raises:
        UnsupportedError: another launcher holds it.
    """

    def __init__(self, directory: Path, name: str = "elastic.lock") -> None:
        self._file: IO[str] = _open_lock(directory / name)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            who = self._file.read().strip() or "a process of another host"
            self._file.close()
            raise UnsupportedError(
                f"the launcher of the run in {directory} still runs ({who}): end it first"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()

    def close(self) -> None:
        """Release it for another launcher."""
        self._file.close()


def _open_lock(path: Path) -> IO[str]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be locked: {error.strerror}; is it a link?") from error
    return os.fdopen(file, "a+", encoding="utf-8")
