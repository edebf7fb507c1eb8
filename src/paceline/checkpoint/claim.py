# SPDX-License-Identifier: Apache-2.0
"""Claims: one run at a time writes steps into a store; and whether it is writable is known before training.

In a directory, a process of the run holds a POSIX lock on a file; the kernel releases it however the process ends, so
there is nothing to remove by hand. The file names the holder and its run, because the workers of an elastic run share
a store and take over from each other.

Object stores have no locks: a plugin's lease (:class:`Claim`) stands in for one there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import time
from pathlib import Path
from typing import Any, Protocol

from paceline.core import runtime
from paceline.core.disk import FileLock
from paceline.core.world import host_name
from paceline.errors import CheckpointError

logger = logging.getLogger("paceline")

LOCK, PROBE = ".paceline-lock", ".paceline-probe"
PROBE_BYTES = 1 << 16
WAIT_S = 5.0
"""Seconds for the processes of an earlier start to end."""
LOOK_S = 0.05
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class InUseError(CheckpointError):
    """Another run uses the store."""


class Claim(Protocol):
    """A run's claim to a store."""

    def take(self) -> None:
        """Take it; CheckpointError if the store cannot be written, or another run uses it."""

    def check(self) -> None:
        """Called before a step is written: InUseError if another run uses the store by now; CheckpointError if it is
        unknown."""

    def release(self) -> None:
        """Release it for other runs."""


def new_run() -> str:
    """The name of this run; the launcher gives the same to all workers and all restarts."""
    return os.environ.get("PACELINE_RUN") or secrets.token_hex(8)


def sign_of(run: str) -> dict[str, Any]:
    """The content of a lock or a lease."""
    return {
        "run": run,
        "host": host_name(),
        "pid": runtime.pid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(runtime.wall())),
    }


def in_use(place: str, holder: dict[str, Any]) -> InUseError:
    """The error for a store that another run uses."""
    process, host = holder.get("pid", "?"), holder.get("host", "an unknown host")
    who = f"process {process} on {host}, since {holder.get('since', '?')}"
    return InUseError(
        f"{place} is in use by another run ({who}), and one run at a time can write its steps into a place; end that "
        "run, or give checkpoint= another place, such as a folder of its own in this one"
    )


class DirectoryClaim:
    """A claim to a directory, which is created."""

    def __init__(self, directory: Path, run: str) -> None:
        self._directory, self._run = directory, run
        self._held: FileLock | None = None

    def take(self) -> None:
        disk = runtime.disk()
        if disk.exists(self._directory) and not disk.is_folder(self._directory):
            raise CheckpointError(f"{self._directory} is no directory; give one for the steps of this run")
        try:
            disk.make_folder(self._directory)
            disk.sync_folder(self._directory.parent)
            self._probe()
            self._lock()
        except OSError as error:
            raise CheckpointError(
                f"{self._directory} cannot be written ({error.strerror or error}: {error.filename or ''}); give "
                "checkpoint= a directory in which this user may write, on a disk with room"
            ) from error

    def check(self) -> None:
        if self._held is None or not self._held.holds():
            try:
                self._lock()
            except FileNotFoundError:
                pass  # the directory was removed; the next writer creates it again
            except OSError as error:
                raise CheckpointError(f"{self._directory} cannot be written: {error}") from error

    def release(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.release()

    def _probe(self) -> None:
        """Write a new file, as a step does."""
        file, disk = self._directory / PROBE, runtime.disk()
        if disk.is_link(file):
            raise CheckpointError(f"{file} is a link; remove it")
        try:
            disk.write(file, bytes(PROBE_BYTES))
            with contextlib.suppress(FileNotFoundError):  # another worker probes, too, and was faster
                disk.sync(file)
        finally:
            with contextlib.suppress(FileNotFoundError):
                disk.remove(file)

    def _lock(self) -> None:
        """Take the lock, unless another process of this run holds it."""
        self.release()
        until = runtime.monotonic() + WAIT_S
        while True:
            holder = self._try()
            if holder is None or holder.get("run") == self._run:
                return
            if runtime.monotonic() > until:
                raise in_use(str(self._directory), holder)
            runtime.sleep(LOOK_S)  # an earlier process may be about to end, or a new one to write its name

    def _try(self) -> dict[str, Any] | None:
        """None if this process holds the lock now; else what its holder wrote."""
        file, disk = self._directory.resolve() / LOCK, runtime.disk()
        try:
            self._held = disk.lock(file)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            logger.warning("%s has no locks: nothing keeps a second run from writing there", self._directory)
            return {"run": self._run}
        if self._held is None:
            return held_by(disk.read(file))
        self._held.write(json.dumps(sign_of(self._run)).encode())
        return None


def held_by(data: bytes) -> dict[str, Any]:
    """What the holder of a lock or a lease wrote; empty if it is not whole."""
    with contextlib.suppress(ValueError):
        holder = json.loads(data)
        if isinstance(holder, dict):
            return holder
    return {}
