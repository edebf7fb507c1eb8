# SPDX-License-Identifier: Apache-2.0
"""This process in its MPI job: waits with a deadline, and how the workers of a job fail together.

MPI itself waits for ever, and after a failure its communicators cannot be used again. So a wait here asks MPI again and
again until a deadline. Then the worker tells all others, on a communicator of its own, what it was waiting for. The
others hear that in their own waits, fail as well, and answer. A worker that is busy in the user's program answers from
a thread, if MPI was started with MPI_THREAD_MULTIPLE. Who does not answer is dead, stopped or cut off. The job then
ends with MPI_Abort when its processes end.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

from paceline.communication.diagnosis import LONGEST, SHOWN, Doing, place_of, rows, table
from paceline.core.world import World
from paceline.errors import ClosedError, PeerLostError, UnsupportedError
from paceline_plugins.mpi import library
from paceline_plugins.mpi.operation import MpiOperation, Pauses, Steps

LISTEN_EVERY_S = 0.05
GRACE_S = 1.0
"""Seconds that a wait goes on after another worker's report: what is under way may still arrive."""
LONGEST_CALL_S = 5.0
"""Most seconds for all reports; less if a quarter of the deadline is less."""
LINGER_S = 2 * GRACE_S
"""Most seconds that a worker which ends with an error waits for the others to hear of it, before the job ends."""
LAST_WORDS_S = 0.3
"""For them to write their errors."""
ATTEND_EVERY_S = 0.25
"""How often the thread looks for a question."""
REPORT, ASKS = 1, 2
"""Tags: what a worker was doing when it failed; the same from one that asks the others."""

_here: list[MpiJob] = []


def job(timeout_s: float) -> MpiJob:
    """This process's job; at the first call all processes of the job have to make it.

    Raises:
        UnsupportedError: there is no MPI that can be used.
        PeerLostError: some process did not make the call within the deadline.
    """
    if not _here:
        _here.append(MpiJob(library.load(timeout_s), timeout_s))
    return _here[0]


class MpiJob:
    """All processes of one MPI job, seen from one of them.

    Args:
        mpi: the module `mpi4py.MPI`.
        timeout_s: for the first meeting of all processes, seconds.
    """

    def __init__(self, mpi: Any, timeout_s: float) -> None:
        self.mpi = mpi
        self.threads: bool = mpi.Query_thread() == mpi.THREAD_MULTIPLE  # whether several threads may call MPI at once
        self.takes_device_memory = library.takes_device_memory(mpi)
        # this worker; its hosts are known after the first connection
        self.world = World(mpi.COMM_WORLD.Get_rank(), mpi.COMM_WORLD.Get_size())
        # called once after a failure, with a row for each worker: what it was doing
        self.on_failure: Callable[[list[dict[str, Any]]], None] = lambda rows: None
        self._lock, self._hearing, self._cause_known = threading.Lock(), threading.Lock(), threading.Event()
        self._user, self._process = threading.get_ident(), os.getpid()
        self._operations, self._in_flight, self._of_steps = 0, set[MpiOperation](), set[MpiOperation]()
        self._waits: dict[int, tuple[MpiOperation, float]] = {}  # thread -> its operation, since when
        self._heard: dict[int, Doing] = {}  # by rank
        self._sent: list[Any] = []  # reports under way, and their memory
        self._failing = self._answered = False
        self._cause = self._table = ""
        self._connections, self._over = 0, threading.Event()
        self._thread: threading.Thread | None = None
        self._words: Any = None
        # a communicator of all processes that no other code of the program uses
        self.everyone = self._duplicate(mpi.COMM_WORLD, timeout_s)
        self._words = self._duplicate(self.everyone, timeout_s)
        atexit.register(self._leave)

    def _duplicate(self, communicator: Any, timeout_s: float) -> Any:
        """A communicator of the same processes, whose errors are exceptions."""
        made, request = communicator.Idup()

        def steps() -> Steps:
            yield [request]

        self.finish(self.start("the first meeting of the job", steps(), 0, timeout_s))
        made.Set_errhandler(self.mpi.ERRORS_RETURN)
        return made

    # -- operations -------------------------------------------------------------------------------

    def start(self, operation: str, steps: Steps, nbytes: int, timeout_s: float, several: bool = False) -> MpiOperation:
        """Begin an operation; its first requests are made here, those of further steps (`several`) during any wait.

        Raises:
            PeerLostError: the job has failed before, or MPI refuses the operation.
            UnsupportedError: this thread may not call MPI.
        """
        self._check_thread(operation)
        with self._lock:
            self._operations += 1
            number = self._operations
        if self._failing:
            self.fail(Doing("waits", operation, number), timeout_s, "the job has failed before")
        try:
            made = MpiOperation(self.mpi, self.finish, operation, number, steps, nbytes, timeout_s)
        except self.mpi.Exception as error:
            self.fail(Doing("waits", operation, number), timeout_s, f"MPI said: {_first_line(error)}", error)
        with self._lock:
            self._in_flight.add(made)
            if several:
                self._of_steps.add(made)
        return made

    def _check_thread(self, operation: str) -> None:
        if not self.threads and threading.get_ident() != self._user:
            raise UnsupportedError(
                self.world.sign(
                    f"{operation} in a thread of its own: MPI was started with {library.level_name(self.mpi)}, which "
                    "leaves all calls to the thread that attached; start it with MPI_Init_thread(..., "
                    "MPI_THREAD_MULTIPLE)"
                )
            )

    def finish(self, operation: MpiOperation) -> None:
        """Wait until the operation is complete."""
        self._check_thread(operation.operation)
        if operation.closed:
            raise self.ended(operation.operation)
        began = time.monotonic()
        until, listen_at, pauses = began + operation.timeout_s, began + LISTEN_EVERY_S, Pauses(operation.nbytes)
        thread = threading.get_ident()
        self._waits[thread] = (operation, began)
        doing = Doing("waits", operation.operation, operation.number)
        try:
            while not operation.advance():
                self._advance_others()
                now = time.monotonic()
                if now > listen_at:
                    listen_at = now + LISTEN_EVERY_S
                    if self._failing or self._listen():
                        until = min(until, now + GRACE_S)
                if now > until:
                    self.fail(doing, operation.timeout_s)
                pauses.pause()
        except self.mpi.Exception as error:
            self.fail(doing, operation.timeout_s, f"MPI said: {_first_line(error)}", error)
        finally:
            if not self._failing:  # what a failed worker waited for is reported
                del self._waits[thread]
        with self._lock:
            self._in_flight.discard(operation)
            self._of_steps.discard(operation)

    def _advance_others(self) -> None:
        """Go on with operations of several steps: another worker may wait for them first."""
        for other in list(self._of_steps):
            if other.advance():
                with self._lock:
                    self._of_steps.discard(other)

    def close(self, operations: list[MpiOperation]) -> bool:
        """Give up operations of a connection; whether all were complete. MPI goes on writing into the others' memory,
        which is kept until the process ends."""
        for operation in operations:
            operation.closed = not operation.complete
        return not self._failing and not any(operation.closed for operation in operations)

    def ended(self, operation: str) -> ClosedError:
        """The error of an operation on a closed connection."""
        return ClosedError(self.world.sign(f"{operation}: this connection was closed before"))

    # -- failures ---------------------------------------------------------------------------------

    def fail(self, doing: Doing, timeout_s: float, reason: str = "", error: Exception | None = None) -> NoReturn:
        """Find who is missing and raise `PeerLostError`; the first thread that calls it asks the other workers."""
        with self._lock:
            first, self._failing = not self._failing, True
        if first:
            library.abort_at_exit(self.mpi)
            try:
                self._find_cause(self._roll_call(self._doing(doing), timeout_s))
            finally:
                self._cause_known.set()
        else:
            self._cause_known.wait(2 * LONGEST_CALL_S)
        said = f" {reason}." if reason else ""
        raise PeerLostError(
            self.world.sign(
                f"operation {doing.number} ({doing.operation}, deadline {timeout_s:g} s) failed: {self._cause}.{said} "
                "Look at the last lines of that worker. An MPI job cannot continue after this: mpiexec ends all of its "
                "processes when this one ends; start again from a checkpoint"
            )
            + self._table
        ) from error

    def _doing(self, otherwise: Doing | None = None) -> Doing:
        """What this worker is doing now; from any thread."""
        at = place_of(self._user)
        waits = sorted(self._waits.copy().values(), key=lambda pair: pair[1])
        if waits:
            operation, since = waits[0]
            return Doing("waits", operation.operation, operation.number, time.monotonic() - since, at)
        return Doing("busy", "", self._operations, 0.0, at) if otherwise is None else replace(otherwise, at=at)

    def _roll_call(self, own: Doing, timeout_s: float) -> dict[int, Doing] | None:
        """What each worker was doing ("silent" without a report); None if the workers cannot be asked."""
        if self._words is None:
            return None
        self._tell(own, ASKS)
        others = [rank for rank in range(self.world.size) if rank != self.world.rank]
        until = time.monotonic() + min(LONGEST_CALL_S, max(1.0, timeout_s / 4))
        while time.monotonic() < until and not all(rank in self._heard for rank in others):
            self._listen()
            time.sleep(0.01)
        found = {self.world.rank: own} | {rank: self._heard.get(rank, Doing("silent")) for rank in others}
        return dict(sorted(found.items()))

    def _find_cause(self, doing: dict[int, Doing] | None) -> None:
        if doing is None:
            self._cause = f"not all {self.world.size} processes of the job called attach; MPI does not say which"
            return
        silent, busy = ([rank for rank, one in doing.items() if one.state == state] for state in ("silent", "busy"))
        if silent or busy:
            verb = "answer" if silent else "come"
            self._cause = f"{self.world.names((silent or busy)[:SHOWN])} did not {verb}"
        else:
            self._cause = "no worker is missing, and they wait for different operations, or for messages of each other"
        self._table = table(self.world, doing)
        self.on_failure(rows(doing))

    def _tell(self, doing: Doing, tag: int) -> None:
        """Send a report to all other workers, without waiting."""
        text = bytearray(doing.pack())
        with contextlib.suppress(self.mpi.Exception):
            for rank in range(self.world.size):
                if rank != self.world.rank:
                    self._sent.append((text, self._words.Isend([text, self.mpi.BYTE], rank, tag)))

    def _listen(self) -> bool:
        """Take the reports that have arrived; whether there was any so far."""
        if self._words is None or not self._hearing.acquire(blocking=False):
            return bool(self._heard)
        try:
            status = self.mpi.Status()
            while self._words.Iprobe(self.mpi.ANY_SOURCE, self.mpi.ANY_TAG, status):
                text = bytearray(status.Get_count(self.mpi.BYTE))
                source = status.Get_source()
                self._words.Recv([text, self.mpi.BYTE], source, status.Get_tag())
                said = Doing.unpack(bytes(text))
                if source not in self._heard or said.state == "waits":
                    self._heard[source] = said
        except self.mpi.Exception:
            pass
        finally:
            self._hearing.release()
        return bool(self._heard)

    def connected(self, more: int) -> None:
        """Count an open connection (1) or a closed one (-1); a thread answers while there is one.

        Afterwards it is gone, so that the program may end MPI.
        """
        self._connections += more
        if self._connections > 0 and self._thread is None and self.threads:
            self._over.clear()
            self._thread = threading.Thread(target=self._attend, name="paceline-responder", daemon=True)
            self._thread.start()
        elif self._connections == 0 and self._thread is not None:
            self._over.set()
            self._thread.join()
            self._thread = None

    def _attend(self) -> None:
        """Answer for a worker that is busy in the user's program; one that waits answers by itself."""
        while not self._over.wait(ATTEND_EVERY_S):
            if self._listen() and not self._failing and not self._answered and not self._waits:
                self._answered = True
                self._tell(self._doing(), REPORT)

    def _leave(self) -> None:
        """The end of the process: after an error, say so to the others and end the job, instead of waiting for them."""
        if os.getpid() != self._process:
            return  # a forked child: MPI is its parent's
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        if self._failing or self.mpi.Is_finalized():
            return
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if error is None:
            return
        library.abort_at_exit(self.mpi)
        at = f"its end, after {type(error).__name__}: {error}"[:LONGEST]
        self._tell(Doing("busy", "", self._operations, 0.0, at), REPORT)
        until = time.monotonic() + LINGER_S
        while time.monotonic() < until and len(self._heard) < self.world.size - 1:
            self._listen()
            time.sleep(0.01)
        time.sleep(LAST_WORDS_S)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__
