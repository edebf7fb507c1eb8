# SPDX-License-Identifier: Apache-2.0
"""The groups of torch.distributed that carry one connection, and how they fail together.

A connection has many groups: one for the exchanges that follow one another, one for each further channel, one for each
part. They are built here, not by `dist.new_group`: that one either needs every process of the program, or names a group
after the number of groups that a process happens to have, so that members with different histories never find each
other, and a group that is made again finds the addresses of its predecessor. Ours are named after the connection, live
in nobody's registry, and end when nothing refers to them.

That is what a failure needs. The survivors say in the store that they live and drop every group: gloo closes a group's
sockets when nothing refers to it any more (frames of exceptions and operations under way do), which wakes whoever waits
for us; so all hear of it within moments, though only the neighbours of the lost worker can notice by themselves. Then
each looks who else has spoken, asks for those who have not (:mod:`paceline.communication.diagnosis`), and says who
waits for whom.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from paceline.communication.diagnosis import DiagnosisKeys, Doing, Responder, place_of, rows, table
from paceline.core.world import World
from paceline.errors import ClosedError, PeerLostError, UnsupportedError

Begin = Callable[[Any], Any]
"""Starts an operation on the group it is given, and returns torch's handle of it."""


ASK_AFTER_S = 0.3
"""So long those who found the failure themselves have to say so, before it is asked what the others do."""
LONGEST_CALL_S = 5.0
"""So long it is waited for answers, or a quarter of the deadline where that is less."""


class GroupHandle:
    """Holds a group, so that it can be taken away from everybody at once.

    Attributes:
        group: the `dist.ProcessGroup`, None when it was let go.
    """

    def __init__(self, group: Any) -> None:
        self.group = group


class TorchOperation:
    """An operation of torch.distributed under way.

    Args:
        connection: to which it belongs.
        handle: torch's.
        operation: its name, for messages.
        number: counts the operations of the connection.
        then: what remains to be done when the bytes are there.
    """

    def __init__(
        self,
        connection: Connection,
        handle: Any,
        operation: str,
        number: int,
        then: Callable[[], None] | None = None,
    ) -> None:
        self._connection, self.operation, self.number, self._then = connection, operation, number, then
        self.handle = handle
        self.lost = False  # it was under way when the connection failed or was closed

    def wait(self) -> None:
        """Wait for the end; raise `PeerLostError` where it does not come."""
        if self.handle is None and not self.lost:
            return
        try:
            self._connection.finish(self)
        except ClosedError:
            raise
        except RuntimeError as error:
            self._connection.fail(self.operation, error, self.number)
        if self._then is not None:
            self._then()


class Connection:
    """All groups of one worker's connection to the same workers.

    Args:
        name: of the connection, the same on every member and never used before over this store.
        backend: torch's name of the back end, such as "gloo" or "cpu:gloo,cuda:nccl".
        rank: this worker.
        size: workers of the connection.
        timeout_s: deadline of every operation, seconds.

    Attributes:
        told: called once with who waited for whom, when the connection has failed.
    """

    def __init__(self, name: str, backend: str, rank: int, size: int, timeout_s: float) -> None:
        if "gloo" not in backend and "nccl" not in backend:
            raise UnsupportedError(f"exchanges run over the back ends gloo and nccl, and this group's is {backend!r}")
        self.backend, self.timeout_s = backend, timeout_s
        self.world = World(rank, size)  # until the workers have told each other their hosts
        self._name, self._store = name, _store()
        self._lock = threading.Lock()
        self._slots: list[GroupHandle] = []
        self._under_way: set[TorchOperation] = set()
        self._operations = 0
        self._failing = self._closed = False
        self._verdict = self._reason = self._table = ""
        self._judged = threading.Event()
        self._waits: dict[int, tuple[TorchOperation, float]] = {}  # thread -> what it waits for, since when
        self._user = threading.get_ident()  # the thread that trains, as far as one can tell
        self._witness = Responder(self._store, name, rank, self._doing)
        self.told: Callable[[list[dict[str, Any]]], None] | None = None

    def open(self, label: str, ranks: list[int]) -> GroupHandle:
        """A group of `ranks` of the connection, all of whom call this with the same new `label`."""
        if self._failing:
            self.fail(f"opening {label}", RuntimeError("the connection has failed before"))
        if self._closed:
            raise self._ended(f"opening {label}")
        try:
            slot = GroupHandle(self._build(f"paceline/{self._name}/{label}", ranks.index(self.world.rank), len(ranks)))
        except RuntimeError as error:
            self.fail(f"opening {label}", error)
        with self._lock:
            self._slots.append(slot)
        return slot

    def _build(self, prefix: str, rank: int, size: int) -> Any:
        store, timeout = _under(prefix, self._store), timedelta(seconds=self.timeout_s)
        group: Any = dist.ProcessGroup(store, rank, size)
        kinds = dist.ProcessGroup.BackendType
        group._set_default_backend(kinds.GLOO if "gloo" in self.backend else kinds.NCCL)
        if "gloo" in self.backend:
            gloo = dist.ProcessGroupGloo(_under("cpu", store), rank, size, timeout)
            group._register_backend(torch.device("cpu"), kinds.GLOO, gloo)
        if "nccl" in self.backend:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = dist.ProcessGroupNCCL(_under("cuda", store), rank, size, options)
            group._register_backend(torch.device("cuda"), kinds.NCCL, nccl)
        return group

    def start(
        self, slot: GroupHandle, operation: str, begin: Begin, then: Callable[[], None] | None = None
    ) -> TorchOperation:
        """Start `operation` on the group of `slot`."""
        with self._lock:
            self._operations += 1
            number, group, failing = self._operations, slot.group, self._failing
        if group is None and not failing:
            raise self._ended(operation)
        problem: RuntimeError | None = None
        work = None
        try:
            if group is None:
                raise RuntimeError("the connection has failed before")
            work = TorchOperation(self, begin(group), operation, number, then)
        except RuntimeError as error:
            problem = error
        del group, begin  # they would keep the sockets open
        if work is not None:
            with self._lock:
                if not self._failing:
                    self._under_way.add(work)
                    return work
            work.handle = None
            problem = RuntimeError("the connection failed meanwhile")
        assert problem is not None
        self.fail(operation, problem, number)

    def finish(self, work: TorchOperation) -> None:
        """Wait for `work` at torch; a `RuntimeError` where that fails or the connection has."""
        handle = work.handle
        if handle is None:
            if not self._failing:
                raise self._ended(work.operation)
            raise RuntimeError("the connection has failed before")
        thread = threading.get_ident()
        self._waits[thread] = (work, time.monotonic())
        try:
            handle.wait()
        finally:
            del handle
        del self._waits[thread]  # only here: what a failed worker waited for is told to the others
        with self._lock:
            work.handle = None
            self._under_way.discard(work)

    def fail(self, operation: str, error: RuntimeError, number: int | None = None) -> NoReturn:
        """Find out who is missing and raise `PeerLostError`; the first thread to come here asks, the others wait."""
        if self._closed and not self._failing:
            raise self._ended(operation) from error
        if error.__traceback__ is not None:
            traceback.clear_frames(error.__traceback__)  # torch's frames hold the group, which has to go
        with self._lock:
            first = not self._failing
            self._failing = True
            number = self._operations if number is None else number
        if first:
            try:
                self._reason = first_line(error)
                self._judge(self._roll_call(Doing("waits", operation, number)))
            finally:
                self._judged.set()
        else:
            self._judged.wait()
        raise PeerLostError(
            self.world.sign(
                f"operation {number} ({operation}, deadline {self.timeout_s:g} s) failed: {self._verdict}. Look at the "
                "last lines of that worker; it died, hung, was cut off, made other calls, or made fewer steps and left "
                f"without run.close(). The back end said: {self._reason}"
            )
            + self._table
        ) from error

    def _doing(self) -> Doing:
        """What this worker is doing now; may be asked by any thread."""
        at = place_of(self._user)
        waits = sorted(self._waits.copy().values(), key=lambda pair: pair[1])
        if not waits:
            return Doing("busy", "", self._operations, 0.0, at)
        work, since = waits[0]
        return Doing("waits", work.operation, work.number, time.monotonic() - since, at)

    def _roll_call(self, failed: Doing) -> dict[int, Doing] | None:
        """Say what we waited for, wake those who still wait, and see who else speaks up or is answered for.

        Returns what everybody was doing, "silent" of those who do not say; None where the store is gone.
        """
        now, size, places = self._doing(), self.world.size, DiagnosisKeys(self._store, self._name)
        own = now if now.state == "waits" else replace(failed, at=now.at)
        doing = {self.world.rank: own}
        try:
            self._store.set(places.came(self.world.rank), own.pack())
            self.drop()
            began, asked = time.monotonic(), False
            while len(doing) < size and time.monotonic() < began + min(LONGEST_CALL_S, max(1.0, self.timeout_s / 4)):
                places.read(doing, range(size))
                if not asked and time.monotonic() > began + ASK_AFTER_S:  # by then those who wait have heard of it
                    asked = True
                    places.ask(rank for rank in range(size) if rank not in doing)
                time.sleep(0.02)
        except Exception:  # whatever the store raises: the error says that no worker can be named
            return None
        finally:
            self.drop()
        return {rank: doing.get(rank, Doing("silent")) for rank in range(size)}

    def _judge(self, doing: dict[int, Doing] | None) -> None:
        """Put into words who is missing."""
        if doing is None:
            self._verdict = (
                "nobody can be named, because the store is gone in which the workers leave word (it lives in the "
                "launcher, or in rank 0)"
            )
            return
        silent, busy = ([rank for rank, one in doing.items() if one.state == state] for state in ("silent", "busy"))
        if silent or not busy:
            self._verdict = f"{self.world.names(silent) if silent else 'nobody that we can name'} did not answer"
        else:
            self._verdict = f"{self.world.names(busy)} did not come"
        self._table = table(self.world, doing)
        if self.told is not None:
            self.told(rows(doing))

    def _ended(self, operation: str) -> ClosedError:
        return ClosedError(self.world.sign(f"{operation}: this connection was closed before"))

    def close(self) -> None:
        """Let everything go; what is under way and not waited for is lost."""
        self._closed = True
        self._witness.end()
        self.drop()

    def drop(self, slots: list[GroupHandle] | None = None) -> None:
        """Let go of `slots`, all of them by default: their sockets close, and peers that wait hear of it at once."""
        with self._lock:
            if slots is None:
                slots, self._slots = self._slots, []
                for work in self._under_way:  # an operation under way refers to the group's connections
                    work.handle, work.lost = None, True
                self._under_way.clear()
            else:
                self._slots = [slot for slot in self._slots if slot not in slots]
            for slot in slots:
                slot.group = None
        gc.collect()


def _store() -> Any:
    """The store over which the default group was made: our only way to speak when our groups are gone."""
    return dist.distributed_c10d._get_default_store()


def _under(prefix: str, store: Any) -> Any:
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]


def first_line(error: BaseException) -> str:
    """What an error of torch says, without the trace that it brings along."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
