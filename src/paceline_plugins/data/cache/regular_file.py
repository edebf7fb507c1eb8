# SPDX-License-Identifier: Apache-2.0
"""Opens files in a directory that other users may write to: never follows a link that they placed there."""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

from paceline.errors import CacheError

_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE of linux/falloc.h


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
    with open_empty(path) as file:
        write_all(file, data)


def open_empty(path: Path) -> BinaryIO:
    """A file without content, to be written without a buffer. A new one is not cut: that takes as long as making it."""
    file = os.fdopen(open_regular(path, os.O_WRONLY | os.O_CREAT), "wb", buffering=0)
    if os.fstat(file.fileno()).st_size:
        file.truncate(0)
    return file


def write_all(file: BinaryIO, chunk: bytes) -> None:
    """Write every byte: one write of an unbuffered file may take fewer."""
    view = memoryview(chunk)
    while view:
        view = view[file.write(view) :]


def allocate(descriptor: int, size: int) -> None:
    """Find room for `size` bytes at once, where the file system can: blocks that are found one write at a time cost as
    much as the bytes. The size of the file stays as it is, so that it shows how much is written.

    A disk without that much room is noticed by the writes.
    """
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)  # Python's own writes a byte to each block where it must
    if fallocate is not None and size > 0:
        fallocate(descriptor, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(size))


def _refused(path: Path) -> CacheError:
    return CacheError(
        f"{path} is a link or no file, which paceline does not make: another program put it there; remove it, and let "
        "only people whom you trust write to that directory"
    )
