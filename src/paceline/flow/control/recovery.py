# SPDX-License-Identifier: Apache-2.0
"""The control plane's record: it is on disk before any message that depends on it, and a restarted server loads it.

One write serves all events that wait. While one thread writes, the other threads carry out their events; the next write
has all of them. Each thread waits until the record has its own event (D. DeWitt et al., Implementation Techniques for
Main Memory Database Systems, SIGMOD 1984).
"""

from __future__ import annotations

import hmac
import json
import threading
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from paceline.communication.sockets.identity import Identity
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import CheckpointError, GivenUpError, RefusedError
from paceline.flow.control.members import WorkerRecord
from paceline.flow.control.messages import Generation, WorkerAddress
from paceline.flow.control.state_machine import StateMachine


class GroupCommit:
    """The writer of the record, and the queue of what is sent after it.

    Args:
        lock: of the state; a caller of `add` and `flush` holds it, once.
        changed: with the lock held: the state to write; None if nothing has changed.
        write: writes that state, without the lock.
    """

    def __init__(
        self, lock: threading.RLock, changed: Callable[[], bytes | None], write: Callable[[bytes], None]
    ) -> None:
        self._lock, self._changed, self._write = lock, changed, write
        self._idle = runtime.Condition(lock)
        self._busy = False
        self._calls: deque[Callable[[], object]] = deque()
        self._flushes = self._done = 0

    def add(self, call: Callable[[], object]) -> None:
        """`call` tells of an event: it is made once the record has that event, with the lock held, in order."""
        self._calls.append(call)

    def flush(self) -> None:
        """Return once the record has all events so far, and all calls so far are made; the lock is free meanwhile."""
        self._flushes += 1
        mine = self._flushes
        while self._done < mine:
            if self._busy:
                self._idle.wait()
            else:
                self._round()

    def close(self) -> None:
        """Flush, and write nothing more: a successor may read the record. The caller sees to it that no call tells."""
        self.flush()
        while self._busy:
            self._idle.wait()
        self._changed = lambda: None

    def _round(self) -> None:
        """One write, and the calls that waited for it."""
        self._busy, number, count = True, self._flushes, len(self._calls)
        try:
            state = self._changed()
            if state is not None:
                self._lock.release()
                try:
                    self._write(state)
                finally:
                    self._lock.acquire()
            for _ in range(count):
                self._calls.popleft()()
            self._done = number
        finally:
            self._busy = False
            self._idle.notify_all()


FORMAT = "paceline control 2"
WITHOUT_CHECKSUM = "paceline control 1"
"""An earlier format, which is still read."""
ADVICE = "move it away to begin anew; the workers then start from a checkpoint"


def encode(state: dict[str, Any]) -> bytes:
    """The contents of the file of a record."""
    text = _text(state)
    head = _text({"format": FORMAT, "crc32": zlib.crc32(text)})
    return head[:-1] + b"," + text[1:]  # encoded once: it is long with many workers


def write(path: Path, text: bytes) -> None:
    """Replace the record by a result of `encode`; only its owner can read it, since it holds the workers' secrets.

    Raises:
        OSError: it cannot be written; the previous record is kept.
    """
    beside, disk = path.with_name(f"{path.name}.tmp"), runtime.disk()
    disk.write_private(beside, text)
    disk.sync(beside)
    disk.replace(beside, path)
    disk.sync_folder(path.parent)


def read(path: Path) -> dict[str, Any] | None:
    """The last written record; None if there is no file.

    It is on the disk for sure when this returns. The process that renamed it may have been killed before it had synced
    the folder, and the reader will tell workers what is in it.

    Raises:
        CheckpointError: the file is damaged, or of another kind.
    """
    disk = runtime.disk()
    try:
        content = json.loads(disk.read(path))
        disk.sync(path)
        disk.sync_folder(path.parent)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(content, dict) or content.get("format") not in (FORMAT, WITHOUT_CHECKSUM):
        its_format = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(
            f"{path} is no record of the control plane: it has {its_format!r}, not {FORMAT!r}; {ADVICE}"
        )
    state = {name: value for name, value in content.items() if name not in ("format", "crc32")}
    if content["format"] == FORMAT and content.get("crc32") != zlib.crc32(_text(state)):
        raise damaged(path, "its checksum does not fit its contents")
    return state


def _text(state: dict[str, Any]) -> bytes:
    return json.dumps(state, separators=(",", ":")).encode()


def damaged(path: Path | None, why: str) -> CheckpointError:
    """The error for an invalid record."""
    return CheckpointError(f"the control plane's record {path} cannot be read: {why}; {ADVICE}")


class MemberState(NamedTuple):
    """What a member that reconnects says of itself: the exchange whose state it has (-1 for none), the one that it has
    reached, and the newest generation that it knows."""

    holding: int
    started: int
    generation: int


def state(machine: StateMachine) -> dict[str, Any]:
    """The state for the record; serializable as JSON."""
    return {
        "generation": machine.generation.note(),
        "exchange": machine.exchange,
        "committed_in": machine.committed_in,
        "next_worker": machine.next_worker,
        "people": [_saved(one) for one in machine.workers.values()],
        "fingerprint": machine.fingerprint,
        "gone": [[worker, why] for worker, why in machine.gone.items()],
        "finished": machine.finished,
        "ended": machine.ended,
        "run": machine.run,
        "wanted": machine.wanted,
        "restores": [machine.restores, machine.restored_from],
        "books": machine.ledger.state(),
        "admission": machine.admission.state(),
    }


def _saved(record: WorkerRecord) -> dict[str, Any]:
    return {
        "place": record.place.note(),
        "secret": record.secret,
        "member": record.member,
        "holds": record.holds,
        "told": record.told,
    }


def load(machine: StateMachine, content: dict[str, Any], now: float) -> None:
    """Load a result of `state`: wait for its members, and lease nothing before all have reconnected."""
    machine.generation = Generation.read(content["generation"])
    machine.exchange, machine.committed_in = content["exchange"], content["committed_in"]
    machine.recorded = (machine.generation.number, machine.exchange)
    machine.next_worker, machine.fingerprint = content["next_worker"], content["fingerprint"]
    machine.gone = {int(worker): str(why) for worker, why in content["gone"]}
    machine.finished, machine.ended = bool(content["finished"]), str(content["ended"])
    machine.run = str(content.get("run", machine.run))
    machine.wanted = content.get("wanted", 0)
    machine.restores, machine.restored_from = content.get("restores", [0, -1])
    machine.ledger.load(content["books"], now)
    machine.admission.load(content.get("admission", {}))
    for one in content["people"]:
        place = WorkerAddress.read(one["place"])
        machine.workers[place.worker] = WorkerRecord(
            place, str(one["secret"]), now, bool(one["member"]), bool(one["holds"]), absent=now, told=int(one["told"])
        )
    known = set(machine.workers)
    machine.absent = set(known)
    machine.roll.begin(machine.members, machine.exchange + 1)
    machine.broken = machine.generation.number == 0 or not known >= set(machine.generation.workers)
    if machine.broken and machine.generation.number:
        machine.settle(now, "the control plane was started again")
    machine.generation = replace(machine.generation, exchange=machine.exchange)


def known(machine: StateMachine, worker: int, secret: Any, identity: Identity | None = None) -> WorkerRecord:
    """The worker with this number, secret and certificate; GivenUpError if there is none."""
    record = machine.workers.get(worker)
    if record is None:
        why = machine.gone.get(worker, "it is not known here; was the control plane started without its record?")
        raise GivenUpError(f"worker {worker} was given up: {why}")
    if not isinstance(secret, str) or not hmac.compare_digest(record.secret.encode(), secret.encode()):
        raise GivenUpError(f"worker {worker} was given up: another process has its number")
    problem = machine.admission.mismatch(worker, identity)
    if problem:
        raise RefusedError(problem)
    return record


def back(machine: StateMachine, record: WorkerRecord, reported: MemberState, marks: list[Mark], now: float) -> None:
    """A member has reconnected after a restart of the server.

    The restarted server may have formed a generation without it, and counted it among those that need the state, since
    the record did not say that it has it. Then there is a new generation, in which it keeps its state and its leases.

    Args:
        machine: of the run.
        record: the member's.
        reported: what it says of itself.
        marks: the leases that it holds.
        now: the time.

    Raises:
        GivenUpError: it is ahead of the record.
    """
    if record.absent is None:
        raise GivenUpError(f"worker {record.worker} was given up: it was taken for dead, or came twice")
    generation, exchange = machine.recorded
    ahead = (("holds exchange", reported.holding, exchange), ("knows generation", reported.generation, generation))
    for what, its, recorded in ahead:
        if its > recorded:  # the disk was full when the record should have been written
            raise GivenUpError(
                f"worker {record.worker} was given up: it {what} {its}, and the record of the control plane, which "
                f"could not be written, knows {recorded} only; a worker that is started in its place joins with the "
                "run's state"
            )
    record.absent, record.seen = None, now
    machine.absent.discard(record.worker)
    machine.suspicion.heard(record.worker, now)
    record.holds = record.holds or reported.holding == machine.exchange
    record.started = min(reported.started, machine.exchange + 1)
    if record.member:
        machine.roll.note(record)
    machine.ledger.holds(record.worker, marks)
    machine.outbox.log("back", worker=record.worker, host=record.place.host)
    if record.member and not machine.broken:
        behind = reported.generation < machine.generation.number
        if behind and record.holds and record.worker in machine.generation.newcomers:
            machine.break_off(f"{record.name} has come back, and has the state", now)
        else:
            machine.outbox.send(record.worker, "generation", note=machine.generation.note())
    if machine.paused:
        saves = int(record.worker == machine.saver)
        machine.outbox.send(record.worker, "paused", numbers=(saves,), note=machine.paused)
    machine.tell_waiting()
    if not machine.absent:
        for one in machine.workers.values():
            machine.outbox.send(one.worker, "news")
    machine.call(now)
