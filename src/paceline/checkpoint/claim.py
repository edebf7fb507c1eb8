# SPDX-License-Identifier: Apache-2.0
"""Claims: one run at a time writes steps into a store; and whether it is writable is known before training.

In a directory, a process of the run holds a POSIX lock on a file; the kernel releases it however the process ends, so
there is nothing to remove by hand. The file names the holder and its run, because the workers of an elastic run share
a store and take over from each other.

Object stores have no locks. There an object, a lease, holds the same; the run renews it. A run takes over the lease of
another run if it is no longer renewed, or if its process is known to have ended. A run that finds another run's lease
instead of its own writes no more steps and ends.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from paceline.core import runtime
from paceline.core.disk import FileLock
from paceline.core.world import host_name
from paceline.errors import CheckpointError

logger = logging.getLogger("paceline")

LOCK, PROBE, LEASE = ".paceline-lock", ".paceline-probe", "paceline-lease/lease.json"
PROBE_BYTES = 1 << 16
WAIT_S = 5.0
"""Seconds for the processes of an earlier start to end."""
RENEW_S = 20.0
"""Seconds from one renewal of a lease to the next."""
LOOK_S = 0.05
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


class InUseError(CheckpointError):
    """Another run uses the store."""


class Claim(Protocol):
    """A run's claim to a store."""

    def take(self) -> None:
        """Take it; CheckpointError if the store cannot be written, or another run uses it."""

    def check(self) -> None:
        """Called before a step is written.

        Raises:
            InUseError: another run uses the store by now.
            CheckpointError: it is unknown.
        """

    def release(self) -> None:
        """Release it for other runs."""


def new_run() -> str:
    """The name of this run; the launcher gives the same to all workers and all restarts."""
    return os.environ.get("PACELINE_RUN") or secrets.token_hex(8)


def about(run: str) -> dict[str, Any]:
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


# -- directories -------------------------------------------------------------------------------------------------------


class DirectoryClaim:
    """A claim to a directory, which is created.

    Args:
        directory: of the steps.
        run: the name of the run.
    """

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
            return _table(disk.read(file))
        self._held.write(json.dumps(about(self._run)).encode())
        return None


def _table(data: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        holder = json.loads(data)
        if isinstance(holder, dict):
            return holder
    return {}


# -- object stores -----------------------------------------------------------------------------------------------------


class Lease:
    """A claim to a store without locks.

    Args:
        shown: the store's name for messages.
        run: the name of the run.
        read: returns the lease's bytes; empty if there is none.
        write: replaces it.
        delete: removes it.
    """

    def __init__(
        self,
        shown: str,
        run: str,
        read: Callable[[], bytes],
        write: Callable[[bytes], None],
        delete: Callable[[], None],
    ) -> None:
        self._shown, self._run = shown, run
        self._read, self._write, self._delete = read, write, delete
        self._over = runtime.Event()
        self._thread: threading.Thread | None = None

    def take(self) -> None:
        holder = _table(self._read())
        if holder and holder.get("run") != self._run and not _gone(holder):
            self._await_end(holder)
        self._renew()
        self._thread = runtime.thread(self._keep, "paceline-lease")
        self._thread.start()

    def check(self) -> None:
        holder = _table(self._read())
        if holder and holder.get("run") != self._run:
            raise in_use(self._shown, holder)

    def release(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join(RENEW_S)
            self._thread = None
            with contextlib.suppress(CheckpointError):
                self.check()
                self._delete()

    def _await_end(self, first: dict[str, Any]) -> None:
        """A lease that is not renewed for two and a half times its renewal period has expired."""
        logger.warning("%s: waiting to see whether process %s on %s still writes here", *self._who(first))
        until = runtime.monotonic() + 2.5 * RENEW_S
        while runtime.monotonic() < until:
            holder = _table(self._read())
            if not holder or holder.get("run") == self._run:
                return
            if holder != first:
                raise in_use(self._shown, holder)
            runtime.sleep(min(1.0, RENEW_S / 10))

    def _who(self, holder: dict[str, Any]) -> tuple[Any, Any, Any]:
        return self._shown, holder.get("pid", "?"), holder.get("host", "?")

    def _renew(self) -> None:
        self._write(json.dumps({**about(self._run), "renewal": secrets.token_hex(4)}).encode())

    def _keep(self) -> None:
        """Renew the lease periodically, unless another worker of this run does, or another run took it."""
        last: dict[str, Any] = {}
        while not self._over.wait(RENEW_S):
            with contextlib.suppress(CheckpointError):  # the next step reports a store that is down
                holder = _table(self._read())
                if holder and holder.get("run") != self._run:
                    return
                if holder == last or not holder or holder.get("pid") == runtime.pid():
                    self._renew()
                last = _table(self._read())


def _gone(holder: dict[str, Any]) -> bool:
    """Whether the process that wrote a lease is known to have ended, or is this one."""
    pid = holder.get("pid")
    if holder.get("host") != host_name() or not isinstance(pid, int) or pid <= 0:
        return False
    return pid == runtime.pid() or not runtime.living(pid)
