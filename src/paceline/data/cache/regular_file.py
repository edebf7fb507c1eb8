# SPDX-License-Identifier: Apache-2.0
"""Opens files of a directory that others may write to: a link that lies there is refused, never written through."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from paceline.errors import CacheError


def open_regular(path: Path, flags: int) -> int:
    """The descriptor of a regular file with one name, which may be made (`os.O_CREAT`).

    Raises:
        CacheError: a symbolic link, a second name of a file, a device or a pipe lies there.
        OSError: as `os.open`.
    """
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
    """Replace what the file holds."""
    with os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT), "wb") as file:
        file.truncate(0)
        file.write(data)


def _refused(path: Path) -> CacheError:
    return CacheError(
        f"{path} is a link or no file, which paceline does not make: somebody else put it there; remove it, and let "
        "only people whom you trust write to that directory"
    )
