# SPDX-License-Identifier: Apache-2.0
"""Opens files in a directory that other users may write to: never follows a link that they placed there."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from paceline.errors import CacheError


def open_regular(path: Path, flags: int) -> int:
    """As `os.open`; CacheError if the path is a symbolic link, has a second hard link, or is a device or a pipe."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK, errno.ENXIO):
            raise _refused(path) from None
        raise
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(descriptor)
        raise _refused(path)
    return descriptor


def write_regular(path: Path, data: bytes) -> None:
    """Replace the content of a file."""
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate(0)
        file.write(data)


def _refused(path: Path) -> CacheError:
    return CacheError(
        f"{path} is a link or no file, which paceline does not make: another program put it there; remove it, and let "
        "only people whom you trust write to that directory"
    )
