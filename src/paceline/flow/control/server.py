# SPDX-License-Identifier: Apache-2.0
"""The control plane of an elastic run: the state machine, the sockets around it, and the clock.

A new connection must send its hello before a deadline. The number of connections without one is limited: the oldest is
closed first. After the hello, one thread reads the worker's frames and another sends to it. All events go through the
state machine under one lock; its record is on disk before any message that depends on it is sent, and one write of the
record serves all events that wait.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from paceline.communication.sockets.channel import TLS, Channel, Closed, Frame, listen
from paceline.communication.sockets.frames import write_note
from paceline.communication.sockets.rejected import turned_away
from paceline.core import runtime
from paceline.errors import GivenUpError, MismatchError, OverError, PacelineError, RefusedError
from paceline.flow.control import recovery, validation, wire
from paceline.flow.control.members import Commit, ControlMessage, WorkerRecord
from paceline.flow.control.messages import About, Terms
from paceline.flow.control.recovery import GroupCommit
from paceline.flow.control.state_machine import StateMachine
from paceline.flow.control.wire import MESSAGE_KINDS

OFTEN = 20
"""Events of unauthenticated connections within a minute, at most; the rest are counted."""
_LOG = logging.getLogger("paceline.control")


class EventSender:
    """Calls `told` with each event's (kind, about)."""

    def __init__(self, told: Callable[[str, dict[str, Any]], None]) -> None:
        self._told = told
        self._queue: queue.SimpleQueue[tuple[str, dict[str, Any]] | None] = runtime.SimpleQueue()
        self._guard = runtime.Lock()
        self._count, self._since, self._left_out = 0, runtime.monotonic(), 0
        self._thread = runtime.thread(self._run, "paceline-control-log")
        self._thread.start()

    def tell(self, kind: str, about: dict[str, Any]) -> None:
        """Queue an event."""
        self._queue.put((kind, about))

    def limited(self, kind: str, about: dict[str, Any]) -> None:
        """Queue an event that an unauthenticated connection could cause without limit."""
        with self._guard:
            now = runtime.monotonic()
            if now - self._since > 60:
                self._since, self._count = now, 0
            self._count += 1
            if self._count > OFTEN:
                self._left_out += 1
                return
            left_out, self._left_out = self._left_out, 0
        self.tell(kind, {**about, **({"not_shown": left_out} if left_out else {})})

    def close(self) -> None:
        """Deliver the queued events, and stop."""
        self._queue.put(None)
        self._thread.join(5.0)

    def _run(self) -> None:
        while (one := self._queue.get()) is not None:
            try:
                self._told(*one)
            except Exception:  # a failing log must not end the run
                _LOG.exception("an event of the control plane could not be told: %s", one[0])


SMALL = 1024
"""Bytes of a note, at most, that may be sent at once."""
OUTBOX = 1000
"""Most frames queued for a worker that does not read them; with more it is lost."""
SEND_S = 10.0
"""Seconds in which a worker must read a frame."""
READ_S = 5.0
"""Seconds that an ended connection stays open for what the worker still sends. To close with unread frames resets the
connection, and the worker would lose the last frames that were sent to it."""


class ServerConnection:
    """Sends frames to one worker, in order; the channel's owner closes it."""

    def __init__(self, channel: Channel, name: str) -> None:
        self.channel = channel
        self._outbox: queue.SimpleQueue[tuple[int, tuple[int, ...], bytes] | None] = runtime.SimpleQueue()
        self._queued = self._taken = 0  # frames; each is counted by one thread only
        self._read, self._sent = runtime.Event(), runtime.Event()
        self._ended = False
        runtime.thread(self._send, f"paceline-say-{name}").start()

    def send(self, kind: int, numbers: tuple[int, ...] = (), note: bytes = b"") -> None:
        """Send a frame with a note in JSON, or queue it; never waits. One thread at a time."""
        if self._queued == self._taken and len(note) <= SMALL and self.channel.takes():
            self._try(kind, numbers, note)
        elif self._outbox.qsize() > OUTBOX:
            self.channel.close()
        else:
            self._queued += 1
            self._outbox.put((kind, numbers, note))

    def end(self, read: bool = False) -> None:
        """Close the connection once all queued frames are sent and the worker has closed its end.

        Args:
            read: the worker has closed its end, or nobody reads from it any more.
        """
        if read:
            self._read.set()
        if not self._ended:
            self._ended = True
            self._outbox.put(None)

    def wait_sent(self, limit_s: float) -> None:
        """Wait until an ended connection has sent its frames and is closed."""
        self._sent.wait(limit_s)

    def _send(self) -> None:
        try:
            while (one := self._outbox.get()) is not None:
                if not self._try(*one):
                    return
                self._taken += 1
            self._read.wait(READ_S)
        finally:
            self.channel.close()
            self._sent.set()

    def _try(self, kind: int, numbers: tuple[int, ...], note: bytes) -> bool:
        """Send a frame; whether it is sent. If not, the connection is closed, which its reader sees."""
        try:
            try:
                self.channel.send(kind, numbers, note=note, deadline_s=SEND_S)
            except ValueError as error:  # too long for a frame
                self.channel.send(MESSAGE_KINDS["wrong"], numbers[:1], note=str(error)[:500], deadline_s=SEND_S)
            return True
        except (PacelineError, OSError, ValueError):
            self.channel.close()
            return False


def dispatch(machine: StateMachine, worker: int, frame: Frame, now: float) -> None:
    """Carry out one frame; MismatchError if it is invalid."""
    first, second, third, *_ = frame.numbers
    if frame.kind == wire.STARTS:
        machine.starts(worker, validation.whole(first, 1, validation.HUGE, "an exchange"), now, bool(second))
    elif frame.kind == wire.HOLDS:
        wanted = validation.whole(third, 0, validation.WORKERS, "wanted workers")
        machine.holds_state(worker, *_whole(first, second), now, wanted)
    elif frame.kind == wire.BYE:
        if first == wire.FINISHED:
            machine.bye(worker, now)
        else:
            machine.leave(worker, first == wire.LEAVES_ANYWAY, now)
    else:
        serial = validation.whole(first, 1, validation.HUGE, "a serial number")
        if frame.kind == wire.COMMIT:
            fields = validation.table(frame.note, "a commit")
            facts = validation.small(fields.get("facts"), 1 << 12, "the facts of a commit")
            returned = validation.marks(fields.get("returned", []))
            wanted = validation.whole(fields.get("wanted", 0), 0, validation.WORKERS, "wanted workers")
            commit = Commit(serial, validation.marks(fields.get("marks")), facts, returned, wanted)
            machine.commit(worker, *_whole(second, third), commit, now)
        elif frame.kind == wire.FAILED:
            fields = validation.table(frame.note, "a complaint")
            why = validation.text(fields.get("why"), validation.REASON, "why")
            suspects = validation.workers(fields.get("suspects"))
            machine.failed(worker, serial, _whole(second, 0)[0], why, suspects, now)
        elif frame.kind == wire.ASK:
            machine.ask(worker, serial, validation.question(frame.numbers[1:7]), now)
        elif frame.kind == wire.TELL:
            said_too = validation.rows(frame.note, "what a worker tells")
            if not said_too or not isinstance(said_too[0], str):
                raise MismatchError("a worker tells a kind and values")
            machine.tell(worker, serial, said_too[0], said_too[1:], now)
        elif frame.kind == wire.LEDGER:
            machine.send_ledger(worker, serial)
        else:
            raise MismatchError(f"a worker sends no frame of kind {frame.kind}")


def _whole(generation: int, exchange: int) -> tuple[int, int]:
    return (
        validation.whole(generation, 0, validation.HUGE, "a generation"),
        validation.whole(exchange, 0, validation.HUGE, "an exchange"),
    )


HELLO_S = 5.0
"""Seconds within which a new connection must send its hello."""
MOST_UNIDENTIFIED = 64
"""Most connections without a hello; the oldest is closed to admit another."""
TICK_S = 0.05
"""Seconds between two checks of deadlines."""
STALL_S = 5.0
"""Seconds that the rest of a frame may take once it has begun."""
MOST_ENDING = 1000
"""Most connections that are remembered while they send their last frames."""


class ControlServer:
    """The server; it lives in the launcher.

    Args:
        address: the only address at which it listens.
        port: 0 for any that is free.
        tls: None for unencrypted connections, only on the job's own network.
        terms: the user's settings.
        record: the file of the state; if it exists, the run continues from it. None: the state is not saved.
        told: gets every event, as (kind, about), in a thread of its own.

    Attributes:
        port: where it listens.

    Raises:
        CheckpointError: the record is damaged.
        UnsupportedError: it cannot listen there.
    """

    def __init__(
        self,
        address: str,
        port: int,
        tls: TLS | None,
        terms: Terms,
        record: Path | None = None,
        told: Callable[[str, dict[str, Any]], None] = lambda kind, about: None,
    ) -> None:
        self._machine = StateMachine(terms)
        self._record = record
        self._lock = runtime.RLock()
        self._commits = GroupCommit(self._lock, self._changed, self._write)
        self._connections: dict[int, ServerConnection] = {}
        self._ending: collections.deque[ServerConnection] = collections.deque(maxlen=MOST_ENDING)
        self._heartbeats: dict[int, Channel] = {}
        self._unidentified: dict[Channel, None] = {}
        self._closing = runtime.Event()
        self._start = runtime.token_hex(8)  # a restarted server has another one
        self._ticked = runtime.monotonic()
        self._events = EventSender(told)
        self._load()
        self._listener = listen(address, tls, port)
        self.port = self._listener.port
        self._threads: list[threading.Thread] = []

    def _load(self) -> None:
        state = None if self._record is None else recovery.read(self._record)
        if state is not None:
            try:
                recovery.load(self._machine, state, runtime.monotonic())
            except (LookupError, TypeError, ValueError, AttributeError) as error:
                raise recovery.damaged(self._record, f"{type(error).__name__}: {error}") from error

    def start(self) -> None:
        """Accept workers."""
        for call in (self._accept, self._watch_clock):
            self._threads.append(runtime.thread(call, f"paceline-control{call.__name__}"))
            self._threads[-1].start()

    def close(self) -> None:
        """Close all connections; until their timeout, workers try to reconnect to a server with this record."""
        self._closing.set()
        self._listener.close()
        with self._lock:
            ending = list(self._ending)
        until = runtime.monotonic() + STALL_S
        for connection in ending:
            connection.wait_sent(max(0.0, until - runtime.monotonic()))
        with self._lock:
            self._queue_messages()
            self._commits.close()
            connections = list(self._connections.values())
            channels = [*(one.channel for one in connections), *self._heartbeats.values(), *self._unidentified]
            for channel in channels:
                channel.close()
        for connection in connections:
            connection.end(read=True)
        for thread in self._threads:
            thread.join(5.0)
        self._events.close()

    def adopt(self, sock: socket.socket, peer: str) -> None:
        """Serve a connection that was made elsewhere, such as at a relay."""
        self._listener.adopt(sock, peer)

    def dismiss(self, why: str) -> None:
        """End the run of all present workers, and accept no more."""
        with self._turn() as now:
            self._machine.give_up(why, now)

    def revoke(self, workers: list[int], certificates: list[str], unknown: bool, why: str) -> list[int]:
        """Accept these certificates no more, and close the connections of the workers that have them.

        See `StateMachine.revoke`; the record is written before this returns.
        """
        with self._turn() as now:
            out = self._machine.revoke(workers, certificates, unknown, why, now)
            beating = [self._heartbeats[one] for one in out if one in self._heartbeats]
        for channel in beating:
            channel.close()
        return out

    def status(self) -> dict[str, Any]:
        """The run's status as JSON: generation, exchange, members, waiting, paused, finished, ended."""
        with self._lock:
            return self._machine.status(runtime.monotonic())

    # -- the listener -----------------------------------------------------------------------------

    def _accept(self) -> None:
        for channel in self._listener.accept_while(lambda: not self._closing.is_set()):
            with self._lock:
                if len(self._unidentified) >= MOST_UNIDENTIFIED:
                    oldest = next(iter(self._unidentified))
                    del self._unidentified[oldest]
                    oldest.close()  # its thread reports it
                self._unidentified[channel] = None
            runtime.thread(self._serve, "paceline-control-line", (channel,)).start()

    def _serve(self, channel: Channel) -> None:
        """Serve one connection until it ends."""
        channel.adjust(limit=0, stall_s=STALL_S)
        try:
            hello = channel.receive(deadline_s=HELLO_S)
            if hello.kind != wire.PULSE:
                self._serve_requests(channel, hello)
                return
            try:
                self._serve_heartbeats(channel, self._check_in(hello, channel))
            except GivenUpError as error:  # its request connection reports the error
                turned_away(channel.peer, error)
        except (GivenUpError, RefusedError) as error:
            with contextlib.suppress(PacelineError, ValueError):
                kind = wire.MESSAGE_KINDS["given_up"] if isinstance(error, GivenUpError) else wire.REFUSED
                over = int(isinstance(error, OverError))
                channel.send(kind, (0, over), note=str(error)[: validation.REASON], deadline_s=HELLO_S)
            self._events.limited("refused", {"peer": channel.peer, "why": str(error)})
            turned_away(channel.peer, error)
        except Exception as error:  # invalid input must end its own connection only
            turned_away(channel.peer, error, expected=isinstance(error, Closed))  # as at each worker's end
            if not isinstance(error, Closed) and not self._closing.is_set():
                self._events.limited("stranger", {"peer": channel.peer, "why": f"{error}"[:500]})
        finally:
            with self._lock:
                self._unidentified.pop(channel, None)
            channel.close()

    def _check_in(self, hello: Frame, channel: Channel) -> WorkerRecord:
        with self._lock:
            return recovery.known(self._machine, hello.numbers[0], hello.note, channel.identity)

    # -- a worker's requests ----------------------------------------------------------------------

    def _serve_requests(self, channel: Channel, hello: Frame) -> None:
        worker, connection = self._welcome(channel, hello)
        why = "its connection closed"
        try:
            while True:
                frame = channel.receive()
                with self._turn() as now:
                    if self._connections.get(worker) is not connection:
                        continue  # its last frame is on its way: read on, and ignore it
                    self._carry_out(worker, frame, now)
        except Closed:
            pass
        except Exception as error:  # also in the state machine: other workers continue
            why = f"what it said makes no sense: {error}"[:500]
        finally:
            with self._turn() as now:
                if self._connections.get(worker) is connection and not self._closing.is_set():
                    self._machine.lost([worker], why, now)
            connection.end(read=True)
            connection.wait_sent(STALL_S)

    def _carry_out(self, worker: int, frame: Frame, now: float) -> None:
        self._machine.sign_of_life(worker, now)
        dispatch(self._machine, worker, frame, now)

    def _await_room(self) -> None:
        """If the run is full, wait up to `Terms.return_s` until all recorded workers have reconnected or are lost."""
        while True:
            with self._lock:
                full = len(self._machine.workers) >= self._machine.terms.max_workers
                if not (full and self._machine.absent) or self._closing.is_set():
                    return
            self._closing.wait(TICK_S)

    def _welcome(self, channel: Channel, hello: Frame) -> tuple[int, ServerConnection]:
        if hello.kind == wire.HELLO:
            self._await_room()
        with self._turn() as now:
            if self._closing.is_set():
                raise Closed("the control plane is closed")
            if hello.kind == wire.HELLO:
                record = self._machine.join(About.read(hello.note), now, channel.identity)
            elif hello.kind == wire.BACK:
                fields = validation.table(hello.note, "what a worker says that comes back")
                marks = validation.marks(fields.get("marks"))
                record = recovery.known(self._machine, hello.numbers[0], fields.get("secret"), channel.identity)
                state = recovery.MemberState(*hello.numbers[1:4])
                recovery.back(self._machine, record, state, marks, now)
            else:
                raise MismatchError(f"a connection begins with a hello, not with a frame of kind {hello.kind}")
            connection = self._connections[record.worker] = ServerConnection(channel, str(record.worker))
            del self._unidentified[channel]
            channel.adjust(peer=record.name)
            terms = self._machine.terms
            note = {"secret": record.secret, "beat_s": terms.beat_s, "silence_s": terms.silence_s}
            note |= {"quorum_s": terms.quorum_s, "run": self._machine.run, "most": terms.max_workers}
            note["start"] = self._start
            # Before it is in the record: a worker whose number is in none joins again, one without an answer would end.
            connection.send(wire.WELCOME, (record.worker,), write_note(note))
            return record.worker, connection

    def _serve_heartbeats(self, channel: Channel, record: WorkerRecord) -> None:
        with self._lock:
            self._unidentified.pop(channel, None)
            before, self._heartbeats[record.worker] = self._heartbeats.get(record.worker), channel
        if before is not None:
            before.close()
        try:
            channel.send(wire.WELCOME, note={"start": self._start})
            while True:
                frame = channel.receive()
                step, doing = self._heartbeat(record, frame)
                with self._turn() as now:
                    self._machine.sign_of_life(record.worker, now, doing, step)
                channel.send(wire.BEATEN)
        finally:
            with self._lock:
                if self._heartbeats.get(record.worker) is channel:
                    del self._heartbeats[record.worker]

    def _heartbeat(self, record: WorkerRecord, frame: Frame) -> tuple[int, str]:
        """A worker's steps and activity; a worker whose heartbeats make no sense is lost."""
        try:
            if frame.kind != wire.BEAT:
                raise MismatchError(f"heartbeats are of kind {wire.BEAT}, got {frame.kind}")
            step = validation.whole(frame.numbers[0], 0, validation.HUGE, "steps")
            return step, validation.text(frame.note, 500, "what it does")
        except MismatchError as error:
            with self._turn() as now:
                self._machine.lost([record.worker], f"what it said makes no sense: {error}"[:500], now)
            raise

    # -- the state machine -----------------------------------------------------------------------------

    @contextlib.contextmanager
    def _turn(self) -> Any:
        """Context with the state machine locked. At its end the record has what happened, and the messages are sent.

        Other threads' turns may go on meanwhile. Also a turn without messages waits: what its caller says next, such as
        a refusal, may depend on an event of theirs.
        """
        with self._lock:
            try:
                yield runtime.monotonic()
            finally:
                self._queue_messages()
                self._commits.flush()

    def _queue_messages(self) -> None:
        notes: dict[int, bytes] = {}  # many messages share one, such as the generation
        for one in self._machine.outbox.take():
            self._log(one)
            if one.worker is None or one.worker not in self._connections:
                continue
            connection = self._connections[one.worker]
            if id(one.note) not in notes:
                notes[id(one.note)] = write_note(one.note)
            frame = (wire.MESSAGE_KINDS[one.kind], (one.serial, *one.numbers), notes[id(one.note)])
            self._commits.add(partial(connection.send, *frame))
            if one.kind in ("given_up", "farewell"):
                del self._connections[one.worker]
                self._commits.add(connection.end)
                self._ending.append(connection)

    def _log(self, one: ControlMessage) -> None:
        if one.worker is None:
            self._tell(one.kind, one.note)

    def _tell(self, kind: str, about: dict[str, Any]) -> None:
        self._commits.add(partial(self._events.tell, kind, about))

    def _changed(self) -> bytes | None:
        if not self._machine.dirty or self._record is None:
            return None
        text = recovery.encode(recovery.state(self._machine))
        self._machine.dirty = False
        return text

    def _write(self, state: bytes) -> None:
        assert self._record is not None
        try:
            recovery.write(self._record, state)
        except OSError as error:  # a full disk must not end the run; a restart from the older one is refused then
            self._machine.dirty = True
            self._events.limited("record", {"path": str(self._record), "why": str(error)})

    def _watch_clock(self) -> None:
        while not self._closing.wait(TICK_S):
            with self._turn() as now:
                gap, self._ticked = now - self._ticked, now
                if gap > self._machine.terms.silence_s / 2:  # this process was stopped, or its disk was slow
                    self._machine.forgive(gap)
                self._machine.tick(now)
