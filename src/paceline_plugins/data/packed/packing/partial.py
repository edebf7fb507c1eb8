# SPDX-License-Identifier: Apache-2.0
"""The directory in which a data set is packed, and its lock.

A pack holds a lock on `OUT.partial.lock`, which names its host. The kernel releases the lock of a killed process; the
next pack then removes its files.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from paceline.errors import CacheError, DataError
from paceline_plugins.data.cache.locks import FileLock

OURS = re.compile(r"shard-\d{5,}\.(tar|idx)|index\.json")
LONGEST_NOTE = 4096


@contextlib.contextmanager
def partial_directory(out: Path) -> Iterator[Path]:
    """An empty directory beside `out`, which is removed unless it was renamed; DataError if it may not be used."""
    partial = out.with_name(out.name + ".partial")
    lock = FileLock(out.with_name(out.name + ".partial.lock"))
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        if not lock.try_acquire(shared=False):
            raise DataError(f"another pack is at work in {partial} (its lock is {lock.path}): wait for its end")
    except CacheError as error:
        raise DataError(str(error)) from None
    except OSError as error:
        raise DataError(f"cannot make {partial}: {error.strerror or error}; choose another place") from error
    try:
        _prepare(partial, lock)
    except BaseException:
        lock.release(remove=not os.path.lexists(partial))  # if it stays, it names the host of the leftovers
        raise
    try:
        yield partial
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        lock.release(remove=True)


def _prepare(partial: Path, lock: FileLock) -> None:
    try:
        host = _host(lock.descriptor)
        if os.path.lexists(partial):
            _remove(partial, host)
        note = json.dumps({"host": socket.gethostname(), "process": os.getpid()}).encode()
        os.ftruncate(lock.descriptor, 0)
        os.pwrite(lock.descriptor, note, 0)
        partial.mkdir()
    except OSError as error:
        raise DataError(f"cannot make {partial}: {error.strerror or error}; choose another place") from error


def _host(descriptor: int) -> str:
    """The host of the previous pack; "" if unknown."""
    try:
        return str(json.loads(os.pread(descriptor, LONGEST_NOTE, 0))["host"])
    except (ValueError, KeyError, TypeError):
        return ""


def _remove(partial: Path, host: str) -> None:
    """Remove the files of a killed pack, but no other file."""
    if host != socket.gethostname():
        where = f"on {host}" if host else "by an earlier paceline, or not by a pack"
        raise DataError(
            f"{partial} exists and was made {where}, which may still be packing: remove it when no pack runs there"
        )
    unknown = "a link or a file" if partial.is_symlink() or not partial.is_dir() else _unknown_file(partial)
    if unknown:
        raise DataError(f"{partial} exists and is not what a killed pack leaves ({unknown}): move it away")
    shutil.rmtree(partial)


def _unknown_file(partial: Path) -> str:
    return next((one.name for one in partial.iterdir() if not OURS.fullmatch(one.name) or one.is_symlink()), "")
