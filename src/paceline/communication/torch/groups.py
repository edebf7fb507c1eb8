# SPDX-License-Identifier: Apache-2.0
"""The process groups of torch.distributed that make up one connection, and how they fail together.

A connection has many groups: one for each channel and subgroup. They are built here, not by `dist.new_group`: that
function either needs every process of the program, or names a group after the number of groups that a process has, so
that members with different histories never find each other, and a group that is made again reads the addresses of the
one before it. Ours are named after the connection, are in no registry, and end when nothing refers to them.

A failure needs that. The survivors report in the store and drop every group. gloo closes a group's sockets when nothing
refers to it any more (frames of exceptions and operations in flight do), which wakes the workers that wait for this
one. So all learn of a failure within moments, although only the lost worker's neighbours notice it by themselves. Then
each worker reads the reports, asks the responders of workers without one (:mod:`paceline.communication.diagnosis`), and
raises an error that says who waits for whom.

A group with an operation in flight closes its sockets only when that ends, and its destructor waits for that. So a
worker that has failed, or whose responder has been asked, first ends the connections (`shut_down`). gloo can lose the
end of an operation even so, if the peer dies between its "ready" and our data. So such a group is kept until its
operations have ended (`drop_groups`), and a worker that waits for an operation looks every second whether the
connection has failed elsewhere.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import math
import os
import socket
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.communication.diagnosis import DiagnosisKeys, Doing, Responder, place_of, rows, table
from paceline.core.world import World
from paceline.errors import ClosedError, PeerLostError, UnsupportedError

Begin = Callable[[Any], Any]
"""Starts an operation on a group, and returns torch's handle of it."""

ASK_AFTER_S = 0.3
"""Seconds for the workers' own reports, before the responders are asked."""
LONGEST_CALL_S = 5.0
"""Most seconds for all reports and answers; less if a quarter of the deadline is less."""
LOOK_EVERY_S = 1.0
"""Seconds that a worker waits for an operation before it looks whether the connection has failed at another worker, and
that an operation may take to end after that. So it learns of a failure while the others still collect reports."""
STORE_GONE_S = 30.0
"""Seconds that an operation may take after the store is gone: rank 0 may have ended well and left its last data."""


@dataclass(eq=False)
class GroupHolder:
    """Holds the only reference to a `dist.ProcessGroup`, so that it can be dropped; None then."""

    group: Any


@dataclass(eq=False)
class TorchOperation:
    """An operation of torch.distributed in flight; a `Pending`.

    Attributes:
        operation: its name, for messages.
        number: counts the operations of the connection.
        then: called by `wait` once the data have arrived.
        resumable: a wait with a short deadline leaves it as it is. Not so a message between two workers over gloo: its
            connection is closed at the first deadline.
        ends: its handle knows when it has ended. Not so that of a message between two workers over gloo.
        lost: in flight when the connection failed or was closed.
    """

    connection: Connection
    holder: GroupHolder
    handle: Any
    operation: str
    number: int
    then: Callable[[], None] | None = None
    resumable: bool = False
    ends: bool = False
    lost: bool = False

    def completed(self) -> bool:
        """Whether `wait` would return, or raise, at once; for NCCL, whether the device has done it."""
        handle = self.handle
        return handle is None or bool(handle.is_completed())

    def wait(self) -> None:
        if self.handle is None and not self.lost:
            return
        try:
            self.connection.finish(self)
        except ClosedError:
            raise
        except RuntimeError as error:
            self.connection.fail(self.operation, error, self.number)
        if self.then is not None:
            self.then()


class Connection:
    """All groups of one worker's connection to the same workers.

    Args:
        name: the same on every member and never used before in this store.
        backend: torch's name of the back end, such as "gloo" or "cpu:gloo,cuda:nccl".
        rank: this worker.
        size: workers of the connection.
        timeout_s: deadline of every operation, seconds.

    Attributes:
        on_failure: called once when the connection has failed, with a row for each worker: what it was doing.
    """

    def __init__(self, name: str, backend: str, rank: int, size: int, timeout_s: float) -> None:
        if "gloo" not in backend and "nccl" not in backend:
            raise UnsupportedError(f"exchanges run over the back ends gloo and nccl, and this group's is {backend!r}")
        self.backend, self.timeout_s = backend, timeout_s
        self.world = World(rank, size)  # until the workers have exchanged their host names
        self._name = name
        self._store: Any = dist.distributed_c10d._get_default_store()  # it still works when our groups are gone
        self._lock = threading.Lock()
        self._holders: list[GroupHolder] = []
        self._ports: set[int] = set()  # at which its groups listen
        self._in_flight: set[TorchOperation] = set()
        self._operations = 0
        self._closed = False
        self._failed_at = math.inf  # on the monotonic clock, seconds
        self._cause = self._reason = self._table = ""
        self._cause_known = threading.Event()
        self._waits: dict[int, tuple[TorchOperation, float]] = {}  # thread -> its operation, since when
        self._user = threading.get_ident()  # presumably the training thread
        self._responder = Responder(self._store, name, rank, self._doing, lambda: shut_down(self._ports))
        self.on_failure: Callable[[list[dict[str, Any]]], None] = lambda rows: None

    @property
    def _failing(self) -> bool:
        return self._failed_at < math.inf

    def open(self, label: str, ranks: list[int]) -> GroupHolder:
        """A group of `ranks` of the connection; all of them call this with the same new `label`."""
        if self._failing:
            self.fail(f"opening {label}", RuntimeError("the connection has failed before"))
        if self._closed:
            raise self._ended(f"opening {label}")
        try:
            holder = GroupHolder(
                self._build(f"paceline/{self._name}/{label}", ranks.index(self.world.rank), len(ranks))
            )
        except RuntimeError as error:
            self.fail(f"opening {label}", error)
        with self._lock:
            self._holders.append(holder)
        return holder

    def _build(self, prefix: str, rank: int, size: int) -> Any:
        store, timeout = _under(prefix, self._store), timedelta(seconds=self.timeout_s)
        group: Any = dist.ProcessGroup(store, rank, size)
        kinds = dist.ProcessGroup.BackendType
        group._set_default_backend(kinds.GLOO if "gloo" in self.backend else kinds.NCCL)
        if "gloo" in self.backend:
            before = _listening()
            gloo = dist.ProcessGroupGloo(_under("cpu", store), rank, size, timeout)
            new = _listening() - before
            self._ports |= new if len(new) == 1 else set()  # else another thread has begun to listen meanwhile
            group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if "nccl" in self.backend:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(_under("cuda", store), rank, size, options)
            group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        return group

    def start(
        self, holder: GroupHolder, operation: str, begin: Begin, then: Callable[[], None] | None, collective: bool
    ) -> TorchOperation:
        """Start `operation` on the group of `holder`; `collective` if all members of the group take part."""
        with self._lock:
            self._operations += 1
            number, group = self._operations, holder.group
        problem = RuntimeError("the connection has failed before")
        if group is not None:
            try:
                resumable, ends = collective and "nccl" not in self.backend, collective or "gloo" not in self.backend
                work = TorchOperation(self, holder, begin(group), operation, number, then, resumable, ends)
            except RuntimeError as error:
                problem = error
            else:
                with self._lock:
                    if holder.group is group:
                        self._in_flight.add(work)
                        return work
                problem = RuntimeError("the connection failed meanwhile")  # another thread has dropped the group
                drop_groups([(group, _that_end([work]))])
        dropped = holder.group is None
        del group, begin  # they would keep the sockets open
        if dropped and not self._failing:
            raise self._ended(operation)
        self.fail(operation, problem, number)

    def finish(self, work: TorchOperation) -> None:
        """Wait for torch's `work`; RuntimeError if that or the connection fails."""
        handle = work.handle
        if handle is None:
            if not self._failing:
                raise self._ended(work.operation)
            raise RuntimeError("the connection has failed before")
        thread = threading.get_ident()
        self._waits[thread] = (work, time.monotonic())
        try:
            if work.resumable:
                self._wait_and_look(handle)
            else:
                handle.wait()
        finally:
            del handle
        del self._waits[thread]  # not after an error: what a failed worker waited for is reported
        with self._lock:
            work.handle = None
            self._in_flight.discard(work)

    def _wait_and_look(self, handle: Any) -> None:
        """Wait until torch's operation has ended, or has not ended long after the connection failed elsewhere."""
        while True:
            with contextlib.suppress(RuntimeError):  # too long, or the operation's own error, which is raised below
                handle.wait(timedelta(seconds=LOOK_EVERY_S))
            if handle.is_completed():
                break
            now, grace = time.monotonic(), LOOK_EVERY_S if self._responder.asked else STORE_GONE_S
            if now > min(self._responder.over_at + grace, self._failed_at + LOOK_EVERY_S):
                raise RuntimeError("the connection has failed elsewhere, and this operation does not end")
        handle.wait()

    def fail(self, operation: str, error: RuntimeError, number: int | None = None) -> NoReturn:
        """Find the cause and raise `PeerLostError`; the first thread that calls it asks the other workers."""
        if self._closed and not self._failing:
            raise self._ended(operation) from error
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)  # torch's frames refer to the group
        with self._lock:
            first = not self._failing
            self._failed_at = min(self._failed_at, time.monotonic())
            number = self._operations if number is None else number
        if first:
            try:
                self._reason = first_line(error)
                self._find_cause(self._roll_call(Doing("waits", operation, number)))
            finally:
                self._cause_known.set()
        else:
            self._cause_known.wait()
        raise PeerLostError(
            self.world.sign(
                f"operation {number} ({operation}, deadline {self.timeout_s:g} s) failed: {self._cause}. Look at the "
                "last lines of that worker; it died, hung, was cut off, made other calls, or made fewer steps and left "
                f"without run.close(). The back end reports: {self._reason}"
            )
            + self._table
        ) from error

    def _doing(self) -> Doing:
        """What this worker is doing now; from any thread."""
        at = place_of(self._user)
        waits = sorted(self._waits.copy().values(), key=lambda pair: pair[1])
        if not waits:
            return Doing("busy", "", self._operations, 0.0, at)
        work, since = waits[0]
        return Doing("waits", work.operation, work.number, time.monotonic() - since, at)

    def _roll_call(self, failed: Doing) -> dict[int, Doing] | None:
        """Report what this worker waited for, wake the other workers, and collect reports and answers.

        Returns:
            What each worker was doing ("silent" without a report); None if the store is gone before all that live
            can have answered.
        """
        now, size, keys = self._doing(), self.world.size, DiagnosisKeys(self._store, self._name)
        own = now if now.state == "waits" else replace(failed, at=now.at)
        doing = {self.world.rank: own}
        began, longest, asked = time.monotonic(), min(LONGEST_CALL_S, max(1.0, self.timeout_s / 4)), False
        try:
            self._store.set(keys.key("failed", self.world.rank), own.pack())
            shut_down(self._ports)
            self.drop()
            while len(doing) < size and time.monotonic() < began + longest:
                keys.read(doing, range(size))
                if not asked and time.monotonic() > began + ASK_AFTER_S:  # by then the waiting workers have reported
                    asked = True
                    keys.ask(rank for rank in range(size) if rank not in doing)
                time.sleep(0.02)
        except Exception:  # the store is gone
            if not asked or time.monotonic() < began + longest / 2:
                return None  # no worker can be named
        finally:
            shut_down(self._ports)
            self.drop()
        return {rank: doing.get(rank, Doing("silent")) for rank in range(size)}

    def _find_cause(self, doing: dict[int, Doing] | None) -> None:
        """Describe which workers are missing."""
        if doing is None:
            self._cause = (
                "no worker can be named, because the store is gone in which the workers leave word (it lives in the "
                "launcher, or in rank 0)"
            )
            return
        silent, busy = ([rank for rank, one in doing.items() if one.state == state] for state in ("silent", "busy"))
        if silent or not busy:
            self._cause = f"{self.world.names(silent) if silent else 'an unknown worker'} did not answer"
        else:
            self._cause = f"{self.world.names(busy)} did not come"
        self._table = table(self.world, doing)
        self.on_failure(rows(doing))

    def _ended(self, operation: str) -> ClosedError:
        return ClosedError(self.world.sign(f"{operation}: this connection was closed before"))

    def close(self) -> None:
        """Release everything; operations in flight are lost."""
        self._closed = True
        self._responder.end()
        self.drop()

    def drop(self, holders: list[GroupHolder] | None = None) -> None:
        """Drop the groups of `holders` (default: all): their sockets close, which ends the waits of the peers."""
        dropped: list[tuple[Any, list[Any]]] = []
        with self._lock:
            holders = list(self._holders if holders is None else holders)
            self._holders = [holder for holder in self._holders if holder not in holders]
            for holder in holders:
                lost = [work for work in self._in_flight if work.holder is holder]
                self._in_flight.difference_update(lost)
                dropped.append((holder.group, _that_end(lost)))
                holder.group = None
        drop_groups(dropped)


def _that_end(works: list[TorchOperation]) -> list[Any]:
    """Take the handles of these operations; returns those that know when their operation has ended."""
    handles = [work.handle for work in works if work.ends]
    for work in works:
        work.handle, work.lost = None, True
    return handles


def _under(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def first_line(error: BaseException) -> str:
    """The first line of torch's error, without its stack trace."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


# -- ending the connections of a gloo group ----------------------------------------------------------------------------
# torch offers no way to abort gloo's operations. A group listens at a port of its own, and of each pair of its members
# one accepts the other's connection there. So a process finds the connections that its group has accepted by their
# local port, and shuts them down: the operations of both members fail at once.

DESCRIPTORS = "/dev/fd"


def shut_down(ports: set[int]) -> None:
    """End all connections that were accepted at one of these ports: their operations fail here and at the peers."""
    for sock in _sockets():
        with contextlib.suppress(OSError):
            if sock.getsockname()[1] in ports and not _listens(sock):
                sock.shutdown(socket.SHUT_RDWR)


def _listening() -> set[int]:
    return {sock.getsockname()[1] for sock in _sockets() if _listens(sock)}


def _listens(sock: socket.socket) -> bool:
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, each open only until the next one."""
    if not os.path.isdir(DESCRIPTORS):  # no Unix
        return
    for name in os.listdir(DESCRIPTORS):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                    yield sock


# -- dropping groups ---------------------------------------------------------------------------------------------------
# No thread waits for a destructor: one that comes back from it while the interpreter ends aborts the process.

DROP_S = 1.0
"""Seconds to wait for the operations of dropped groups."""

_lock = threading.Lock()
_kept: list[tuple[Any, list[Any]]] = []  # groups, and torch's operations in flight on each


def drop_groups(groups: list[tuple[Any, list[Any]]]) -> None:
    """Drop groups: their sockets close, which ends the waits of the peers.

    Args:
        groups: each with torch's operations in flight on it; emptied. One whose operations do not end within a moment
            is kept until a later call.
    """
    with _lock:
        _kept.extend(groups)
    groups.clear()
    end = time.monotonic() + DROP_S
    while _sweep() and time.monotonic() < end:
        time.sleep(0.01)


def _sweep() -> int:
    """Destroy the groups whose operations have ended, in this thread; how many others are kept."""
    over: list[tuple[Any, list[Any]]] = []
    kept: list[tuple[Any, list[Any]]] = []
    with _lock:
        for one in _kept:
            (over if all(handle.is_completed() for handle in one[1]) else kept).append(one)
        _kept[:] = kept
    return len(kept)


@atexit.register
def _leave() -> None:
    """The groups that are still kept are never destroyed."""
    drop_groups([])
    for group, _ in _kept:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
