# SPDX-License-Identifier: Apache-2.0
"""A worker's client of the control plane: it joins, commits exchanges, reports failures, and asks for data.

Only the training thread makes these calls, except where noted. Every wait has a deadline, and its error names what was
missing. A restart of the launcher costs time and is otherwise transparent: the connection reconnects, and resends
unanswered requests.
"""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.communication.sockets.channel import TLS, Channel, Closed, Frame, connect
from paceline.communication.sockets.identity import CONTROL, WORKER, refusal
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.errors import (
    LEFT,
    ClosedError,
    GivenUpError,
    MismatchError,
    OverError,
    PacelineError,
    PeerLostError,
    RefusedError,
)
from paceline.flow.control import validation, wire
from paceline.flow.control.ledger import NOTHING, OVER, WORK, HeldLeases
from paceline.flow.control.messages import About, CommitOutcome, Generation

GOODBYE_S = 30.0
"""Seconds to wait for the answer to a goodbye."""
LEAVE_LOOK_S = 0.5
"""Below the quorum: seconds between two looks at whether this worker is to leave."""
_ANSWERS = {NOTHING: "nothing", WORK: "work", OVER: "over"}
_LOG = logging.getLogger("paceline.control")
ATTEMPT_S = 2.0
"""Deadline of one attempt to reconnect, seconds."""
PAUSE_S = 0.1
"""Pause between two attempts to reconnect, seconds."""
FrameParts = tuple[int, tuple[int, ...], Any]
"""The kind of a frame, its numbers and its note."""
_CONNECTIONS: weakref.WeakSet[ClientConnection] = weakref.WeakSet()


class ControlClient:
    """One worker of an elastic run.

    `timeout_s` is for every wait, except for those below the quorum.

    Raises:
        OverError: the run is over.
        RefusedError: this worker runs another program, or there is no room.
        PeerLostError: the control plane cannot be reached.
    """

    def __init__(
        self,
        address: str,
        port: int,
        about: About,
        tls: TLS | None,
        timeout_s: float,
        dial: Callable[[str, float], Channel] | None = None,
    ) -> None:
        where = ControlAddress(address, port, tls, dial)
        self._about, self._timeout_s = about, timeout_s
        self.worker, self._secret = -1, ""  # its number is final once `enter` has returned
        self.run = ""  # its name
        self.generation = Generation()  # the newest known; its number is 0 before this worker is a member
        self.called = 0  # the highest exchange to which this worker was called
        self.paused = ""  # why the run waits for workers
        self.held = ""  # why this worker waits to become a member, with no limit while the control plane answers
        self.most = 0  # members that the user allows
        self.saves = False  # whether this worker writes a checkpoint while the run waits
        self._started = 0
        self._state = -1  # the exchange whose state this worker holds
        self._checkpoint = (0, 0)  # exchanges and wanted members of the checkpoint from which it has that state
        self._news = 0
        self._seen_news = 0
        self._moved = runtime.monotonic()  # when a wait's deadline last started again
        self._doing, self._step = "", 0
        self._serial = 0
        self._start = ""  # of the server
        self._answers: dict[int, Frame] = {}
        self._held_leases = HeldLeases()
        self._error: PacelineError | None = None
        self.leaves = False  # whether this worker is to leave in order; waits below the quorum then end with SystemExit
        self.left = self._gone = False  # whether it has left before the end; at all
        self._trains = runtime.current_thread()
        self._goodbye: int | None = None  # while it waits for the answer to one
        self._alone: int | None = None
        self._changed = runtime.Condition(runtime.RLock())
        self._calls: dict[str, Callable[[Any], None]] = {}
        self._terms: dict[str, float] = {}
        self._connection = ClientConnection(where, timeout_s, self)
        self._heartbeats = Heartbeats(where, self, self._terms["beat_s"], self._terms["silence_s"])
        self._connection.start()

    # -- membership -------------------------------------------------------------------------------

    def enter(self) -> Generation:
        """Wait until this worker is a member; returns its first generation."""
        self._wait(lambda: self.generation.rank(self.worker) is not None, "to be taken in", self._timeout_s)
        return self.generation

    def on_change(self, call: Callable[[Generation], None]) -> None:
        """`call` gets every newer generation at once, in a thread of the client: it must not wait."""
        self._calls["generation"] = call

    def on_pause(self, call: Callable[[str], None]) -> None:
        """`call` gets why the run waits for workers, "" when it continues, in a thread of the client."""
        self._calls["paused"] = call

    def on_hold(self, call: Callable[[str], None]) -> None:
        """`call` gets why this worker waits to become a member, "" when it is due, in a thread of the client."""
        self._calls["held"] = call
        if self.held:  # since before this call
            call(self.held)

    def on_end(self, call: Callable[[str], None]) -> None:
        """`call` gets why the control plane is lost or has dismissed this worker, in a thread of the client."""
        self._calls["ended"] = call

    def doing(self, what: str, step: int) -> None:
        """Report this worker's activity, shown to members that wait for it. Any thread; returns at once."""
        self._doing, self._step = what, step

    def leave(self, how: int = wire.FINISHED) -> int | None:
        """Say goodbye: at the end of the program, or before it (`wire.LEAVES`).

        Returns:
            None once this worker has left; else the number of other members, of which none holds the state yet: this
            worker is a member still, and may save the state, or let them get it, before it says goodbye again.
        """
        self._alone = None
        if self._error is None:
            self._goodbye = how  # repeated if the control plane restarts meanwhile, which the heartbeats notice
            self._connection.send(wire.BYE, (how,))
            with contextlib.suppress(PacelineError):
                gone = lambda: self._gone or self._alone is not None  # noqa: E731
                self._wait(gone, "to say goodbye", min(GOODBYE_S, self._timeout_s))
        if self._alone is None:
            self.left = how != wire.FINISHED
            self.close()
        self._goodbye = None
        return self._alone

    def leave_soon(self) -> None:
        """This worker is to leave in order, after its next exchange."""
        self.leaves = True

    def leave_at_once(self) -> None:
        """This worker leaves without a goodbye: it holds nothing that others need."""
        self.left = True

    def close(self) -> None:
        """Close without a goodbye: the control plane takes this worker for dead."""
        with self._changed:
            self._error = self._error or ClosedError("this worker has left the run")
            self._changed.notify_all()
        self._heartbeats.close()
        self._connection.close()

    # -- exchanges --------------------------------------------------------------------------------

    def starts(self, exchange: int) -> None:
        """This worker has reached an exchange and waits there. Returns at once."""
        self.check()
        with self._changed:
            self._started = max(self._started, exchange)
        self._connection.send(wire.STARTS, (exchange, int(self.leaves)))

    def commit(
        self,
        generation: int,
        exchange: int,
        marks: list[Mark],
        facts: dict[str, Any],
        returned: Sequence[Mark] = (),
        wanted: int = 0,
    ) -> CommitOutcome:
        """This worker has completed the exchange; wait for all members.

        Raises:
            GivenUpError: this worker was removed from the run.
            PeerLostError: the control plane is lost.
        """
        with self._changed:
            if generation == self.generation.number and self._state != self.generation.exchange:
                raise MismatchError(
                    f"worker {self.worker} commits in generation {generation} without its state: take it from the "
                    "donor, then call holds_state"
                )
        note: dict[str, Any] = {
            "marks": [list(one) for one in marks],
            "facts": facts,
            "returned": [list(one) for one in returned],
        }
        note |= {"wanted": wanted} if wanted else {}
        frame = self._request(wire.COMMIT, (generation, exchange), note, "for the others to commit", 2)
        return CommitOutcome(frame.numbers[1] == 1, self._newest(frame))

    def failed(self, generation: int, why: str, suspects: Sequence[int]) -> Generation:
        """The exchange failed here; wait for a newer generation. `suspects` are numbers of workers."""
        note = {"why": why[: validation.REASON], "suspects": list(suspects)}
        frame = self._request(wire.FAILED, (generation,), note, "for a new generation", 2)
        return self._newest(frame)

    def holds_state(self, generation: int, exchanges: int = 0, wanted: int = 0) -> None:
        """This joining worker holds the donor's state, the common start, or a checkpoint, since this generation.

        `exchanges` are in the model, and at the checkpoint that has it the run `wanted` so many members; 0: unknown.
        """
        self.check()
        with self._changed:
            if generation == self.generation.number:
                self._state, self._checkpoint = self.generation.exchange, (exchanges, wanted)
        self._connection.send(wire.HOLDS, (generation, exchanges, wanted))

    # -- the data ---------------------------------------------------------------------------------

    def ask(self, question: Question) -> tuple[str, Mark | None]:
        """("work", a lease), ("nothing", None) at present, or ("over", None) for all workers.

        Raises:
            MismatchError: the workers do not share the same data.
        """
        with self._changed:
            self._seen_news = self._news
            self._started = min(self._started, self.generation.exchange)
        numbers = (question.loader, question.epoch, question.total, question.unit, question.most, int(question.dry))
        frame = self._request(wire.ASK, numbers, None, "for data", 1)
        kind, *mark = frame.numbers[1:6]
        if kind != WORK:
            return _ANSWERS[kind], None
        loader, epoch, begin, end = mark
        return "work", (loader, epoch, begin, end)

    def wait_news(self, timeout_s: float) -> bool:
        """Wait until :meth:`ask` may give a new answer, or this worker is called; returns whether that happened."""
        with contextlib.suppress(TimeoutError):
            self._wait(lambda: self._news > self._seen_news, "for news", timeout_s, TimeoutError)
        return self._news > self._seen_news

    def tell(self, kind: str, *values: Any) -> None:
        """Send a message about the data; returns at once. The next call that waits raises its error.

        "left" loader epoch marks; "ends" loader epoch total; "done" marks; "expect" loader epoch ranges; "waits" bool.
        """
        if kind == "holds" or self.left:
            return  # sent automatically; or the goodbye includes it
        self.check()
        if kind == "left":  # at once: a server restarted after this message would lease them again
            with self._changed:
                self._held_leases.settle(values[-1])
        self._connection.request(wire.TELL, (self._next(),), [kind, *values])

    def ledger(self) -> tuple[int, dict[str, Any]]:
        """The number of the last committed exchange, and the ledger's state as of that commit."""
        fields = self._request(wire.LEDGER, (), None, "for the ledger", 1)
        return fields.numbers[1], validation.table(fields.note, "a ledger")

    # -- within: waiting --------------------------------------------------------------------------

    def _next(self) -> int:
        with self._changed:
            self._serial += 1
            return self._serial

    def _request(self, kind: int, numbers: tuple[int, ...], note: Any, what: str, patience: float) -> Frame:
        self.check()
        serial = self._next()
        self._connection.request(kind, (serial, *numbers), note)
        try:
            self._wait(lambda: serial in self._answers, what, patience * self._timeout_s)
        finally:
            self._connection.answered(serial)
        frame = self._answers.pop(serial)
        if frame.kind == wire.MESSAGE_KINDS["wrong"]:
            raise MismatchError(validation.text(frame.note, validation.REASON, "what is wrong"))
        return frame

    def _wait(
        self,
        ready: Callable[[], bool],
        what: str,
        limit_s: float,
        error: type[Exception] = PeerLostError,
    ) -> None:
        """Wait; time below the quorum has a limit of its own."""
        began = runtime.monotonic()
        with self._changed:
            while not ready():
                self.check()
                if self.paused and self.leaves and self._goodbye is None and runtime.current_thread() is self._trains:
                    self.left = True
                    raise SystemExit(LEFT)  # its work cannot be committed, so other workers do it
                most = self._terms["quorum_s"] + self._timeout_s if self.paused else limit_s
                left = max(began, self._moved) + most - runtime.monotonic()
                if left <= 0:
                    doing = f"; the run waits for workers: {self.paused}" if self.paused else ""
                    raise error(f"worker {self.worker} waited {most:g} s {what} at {self._connection.name}{doing}")
                self._changed.wait(min(left, LEAVE_LOOK_S) if self.paused else left)

    def _newest(self, frame: Frame) -> Generation:
        if frame.note is not None:
            self._learn(Generation.read(frame.note))
        return self.generation

    # -- the control plane's messages, which the connection's thread delivers ---------------------

    def identity(self) -> tuple[int, str]:
        """The first heartbeat's number and secret."""
        return self.worker, self._secret

    def beat(self) -> tuple[int, str]:
        """A heartbeat's steps and activity."""
        return max(0, self._step), self._doing

    def known(self, frame: Frame) -> None:
        """Heartbeats are welcome: to another server, if its machine lost power and the connection has not noticed."""
        start = validation.table(frame.note or {}, "a welcome").get("start", self._start)
        with self._changed:
            gone = start != self._start
        if gone:
            self._connection.renew()

    def beaten(self) -> None:
        """The control plane has answered a heartbeat: a worker that is held waits on."""
        with self._changed:
            if self.held:
                self._moved = runtime.monotonic()

    def hello(self) -> FrameParts:
        """The first frame of a connection."""
        with self._changed:
            if not self._secret:
                return wire.HELLO, (), self._about.note()
            note = {"secret": self._secret, "marks": self._held_leases.marks()}
            return wire.BACK, (self.worker, self._state, self._started, self.generation.number), note

    def to_resend(self) -> list[FrameParts]:
        """Frames that may have been lost while there was no connection."""
        with self._changed:
            fields: list[FrameParts] = [(wire.STARTS, (self._started, int(self.leaves)), None)] if self._started else []
            if self._state == self.generation.exchange:
                fields.append((wire.HOLDS, (self.generation.number, *self._checkpoint), None))
            return [*fields, (wire.BYE, (self._goodbye,), None)] if self._goodbye is not None else fields

    def may_rejoin(self) -> bool:
        """Whether this worker can join as a new one."""
        with self._changed:
            if not self.generation.number:
                self._secret = ""
            return not self._secret

    def welcome(self, frame: Frame) -> None:
        """The answer to the hello."""
        fields = validation.table(frame.note, "a welcome")
        with self._changed:
            self.worker = frame.numbers[0]
            self._secret, self.run = (
                str(fields["secret"]),
                validation.text(fields.get("run", ""), 64, "the name of a run"),
            )
            self._start = str(fields.get("start", ""))
            self._terms = {name: float(fields[name]) for name in ("beat_s", "silence_s", "quorum_s")}
            self.most = validation.whole(fields.get("most", 0), 0, validation.WORKERS, "the most workers")
            self.held = ""
            self._moved = runtime.monotonic()

    def received(self, frame: Frame) -> None:
        """A frame from the control plane."""
        kind = wire.MESSAGE_NAMES.get(frame.kind)
        if kind == "given_up":
            raise given_up(frame)
        if kind == "generation":
            self._learn(Generation.read(frame.note))
        elif kind == "paused":
            self._pause(validation.text(frame.note, validation.REASON, "why"), frame.numbers[1] == 1)
        elif kind == "held":
            self._hold(validation.text(frame.note, validation.REASON, "why"))
        elif kind == "alone":
            with self._changed:
                self._alone = frame.numbers[1]
                self._changed.notify_all()
        elif kind == "check":
            self._heartbeats.prompt()
        elif kind in ("called", "news", "farewell"):
            with self._changed:
                self.called = max(self.called, frame.numbers[1]) if kind == "called" else self.called
                if kind == "farewell":
                    self._gone = True
                    self._connection.finish()
                self._news += 1
                self._changed.notify_all()
        elif kind is not None:
            self._answered(kind, frame)
        else:
            raise MismatchError(f"the control plane says nothing of kind {frame.kind}")

    def _answered(self, kind: str, frame: Frame) -> None:
        """An answer to a request; updates this worker's held leases."""
        with self._changed:
            request = self._connection.answered(frame.numbers[0])
            if request is None:
                return
            if kind == "answer" and frame.numbers[1] == WORK:
                loader, epoch, begin, end = frame.numbers[2:6]
                self._held_leases.add((loader, epoch, begin, end))
            elif kind == "verdict" and frame.numbers[1]:
                self._held_leases.settle([*request[2]["marks"], *request[2]["returned"]])
                self._state = request[1][2]
                if frame.note is None:  # the members are as before
                    self._learn(self.generation.committed(*frame.numbers[2:6]))
            elif request[0] == wire.TELL:
                if kind == "wrong":
                    raise MismatchError(validation.text(frame.note, validation.REASON, "what is wrong"))
                if request[2][0] == "done":
                    self._held_leases.settle(request[2][-1])
                return
            self._answers[frame.numbers[0]] = frame
            self._changed.notify_all()

    def _learn(self, generation: Generation) -> None:
        with self._changed:
            mine, theirs = self.generation, generation
            newer = theirs.number > mine.number
            if newer or (theirs.number == mine.number and theirs.exchange > mine.exchange):
                self.generation = theirs
                if self.held and self.worker in theirs.workers:
                    self.held, self._doing = "", "begins"
                if self.worker in theirs.newcomers:
                    self._state = -1
                    if theirs.restored:
                        self._held_leases.clear()
                self._moved = runtime.monotonic()
                self._news += 1
                self._changed.notify_all()
        if newer:
            self._call("generation", generation)

    def _pause(self, why: str, saves: bool) -> None:
        with self._changed:
            self.paused, self.saves = why, saves
            self._moved = runtime.monotonic()
            self._changed.notify_all()
        self._call("paused", why)

    def _hold(self, why: str) -> None:
        with self._changed:
            self.held, self._moved = why, runtime.monotonic()
            self._changed.notify_all()
        if why:
            self._doing = f"waits to join: {why}"
            _LOG.info("worker %d waits to join: %s", self.worker, why)
        self._call("held", why)

    def _call(self, name: str, value: Any) -> None:
        call = self._calls.get(name)
        if call is not None:
            try:
                call(value)
            except Exception:
                _LOG.exception("a callback for changes of the members has failed")

    def ended(self, error: PacelineError) -> None:
        """The connection is lost for good."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._call("ended", str(error))

    def check(self) -> None:
        """Raise the error that ended this worker's membership, if any."""
        if self._error is not None:
            raise type(self._error)(str(self._error))


@dataclass(frozen=True)
class ControlAddress:
    """Where the control plane is."""

    address: str  # of its listener, or of the relay
    port: int  # of the same
    tls: TLS | None  # None for unencrypted connections
    # (its name for messages, deadline in seconds) -> a channel to it, where it is not reached directly
    dial: Callable[[str, float], Channel] | None = None

    def __str__(self) -> str:
        return f"the control plane at {self.address}, port {self.port}"

    def connect(self, timeout_s: float) -> Channel:
        """A new connection to it; see `channel.connect`."""
        if self.dial is not None:
            return self.dial("the control plane", timeout_s)
        return connect(self.address, self.port, "the control plane", timeout_s, self.tls)


class ClientConnection:
    """The connection for requests; it tries to reconnect for `timeout_s`, and calls its owner in its own thread."""

    def __init__(self, where: ControlAddress, timeout_s: float, owner: ControlClient) -> None:
        self._where, self._timeout_s, self._owner = where, timeout_s, owner
        self._sending = runtime.Lock()
        self._pending: dict[int, FrameParts] = {}  # unanswered requests, in order
        self._closing = runtime.Event()
        self._thread = runtime.thread(self._run, "paceline-member")
        self._channel = self._connect(runtime.monotonic() + timeout_s)
        _CONNECTIONS.add(self)

    def start(self) -> None:
        """Start the receiving thread."""
        self._thread.start()

    @property
    def name(self) -> str:
        """Name of the server, for messages."""
        return str(self._where)

    def send(self, kind: int, numbers: tuple[int, ...] = (), note: Any = None) -> None:
        """Send a frame now, if there is a connection."""
        with self._sending, contextlib.suppress(PeerLostError):
            self._channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)

    def request(self, kind: int, numbers: tuple[int, ...], note: Any = None) -> None:
        """Send a request now, and on every new connection until :meth:`answered`; numbers[0] is its serial number."""
        with self._sending:
            self._pending[numbers[0]] = (kind, numbers, note)
            try:
                self._channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)
            except PeerLostError:
                pass  # it is sent on the next connection
            except BaseException:
                del self._pending[numbers[0]]
                raise

    def answered(self, serial: int) -> FrameParts | None:
        """Stop resending a request; returns it, or None if it was answered before."""
        with self._sending:
            return self._pending.pop(serial, None)

    def finish(self) -> None:
        """The server will close the connection: do not reconnect."""
        self._closing.set()

    def renew(self) -> None:
        """The server is another one than that to which this connects: connect again."""
        self._channel.close()

    def close(self) -> None:
        """Close it."""
        self._closing.set()
        self._channel.close()
        if runtime.current_thread() is not self._thread:
            self._thread.join(5.0)

    def forget(self) -> None:
        """In a forked child: drop the connection, which belongs to the parent."""
        self._channel.abandon()

    # -- the thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            silent_since: float | None = None  # no connection since then brought a frame
            while not self._closing.is_set():
                silent_since = None if self._receive() else self._pause_before_another(silent_since)
                if not self._closing.is_set():
                    self._reconnect()
        except PacelineError as error:
            if not self._closing.is_set():
                self._owner.ended(error)
        except Exception as error:  # a worker that waits for an answer must not wait for ever
            self._owner.ended(MismatchError(f"{self.name} sends invalid frames: {type(error).__name__}: {error}"))
        finally:
            self._channel.close()

    def _receive(self) -> bool:
        """Receive until this connection ends; returns whether a frame came."""
        came = False
        while True:
            try:
                frame = self._channel.receive()
            except PeerLostError:
                return came
            came = True
            self._owner.received(frame)

    def _pause_before_another(self, silent_since: float | None) -> float:
        """A connection ended before it brought a frame; returns since when that is so."""
        now = runtime.monotonic()
        since = now if silent_since is None else silent_since
        if now - since >= self._timeout_s:
            raise PeerLostError(
                f"{self.name}, has closed every connection for {now - since:.0f} s before it sent anything; see what "
                "its launcher printed"
            )
        self._closing.wait(PAUSE_S)
        return since

    def _reconnect(self) -> None:
        until = runtime.monotonic() + self._timeout_s
        while True:
            try:
                channel = self._connect(min(until, runtime.monotonic() + ATTEMPT_S))
                break
            except OverError:
                raise
            except GivenUpError:
                if not self._owner.may_rejoin():
                    raise
            except PeerLostError as error:
                if runtime.monotonic() >= until or self._closing.wait(PAUSE_S):
                    raise PeerLostError(
                        f"{self.name}, was lost and did not come back within {self._timeout_s:g} s ({error}); start it "
                        "again with its record, and then the workers"
                    ) from error
        with self._sending:
            self._channel = channel
            if self._closing.is_set():
                channel.close()
            with contextlib.suppress(PeerLostError):
                for kind, numbers, note in [*self._owner.to_resend(), *self._pending.values()]:
                    channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)

    def _connect(self, until: float) -> Channel:
        """Connect, and exchange hello and welcome."""
        channel = self._where.connect(max(0.1, until - runtime.monotonic()))
        try:
            _check_server(channel)
            channel.adjust(limit=0)
            kind, numbers, note = self._owner.hello()
            channel.send(kind, numbers, note=note, deadline_s=self._timeout_s)
            answer = channel.receive(deadline_s=max(0.1, until - runtime.monotonic()))
            if answer.kind == wire.MESSAGE_KINDS["given_up"]:
                raise given_up(answer)
            if answer.kind == wire.REFUSED:
                raise RefusedError(
                    f"{self.name} refuses this worker: {validation.text(answer.note, validation.REASON, 'why')}"
                )
            if answer.kind != wire.WELCOME:
                raise MismatchError(f"{self.name} answers a hello with a frame of kind {answer.kind}")
            self._owner.welcome(answer)
        except BaseException:
            channel.close()
            raise
        return channel


def _check_server(channel: Channel) -> None:
    """Refuse a worker that poses as the control plane; rank 0 of a run without elastic launchers has one, too."""
    if channel.identity is not None and channel.identity.role == WORKER:
        raise MismatchError(refusal(channel.identity, CONTROL, "the control plane"))


def given_up(frame: Frame) -> GivenUpError:
    """The error that a "given_up" frame reports."""
    return (OverError if frame.numbers[1] else GivenUpError)(validation.text(frame.note, validation.REASON, "why"))


class Heartbeats:
    """The heartbeats, one each `beat_s`, over a connection of their own; each must be answered in `silence_s`."""

    def __init__(self, where: ControlAddress, owner: ControlClient, beat_s: float, silence_s: float) -> None:
        self._where, self._owner, self._beat_s, self._silence_s = where, owner, beat_s, silence_s
        self._closing = runtime.Event()
        self._now = runtime.Event()
        self._channel: Channel | None = None
        self._thread = runtime.thread(self._run, "paceline-heartbeat")
        self._thread.start()
        _HEARTBEATS.add(self)

    def prompt(self) -> None:
        """Send a heartbeat now."""
        self._now.set()

    def close(self) -> None:
        """Stop them."""
        self._closing.set()
        self._now.set()
        if self._channel is not None:
            self._channel.close()
        self._thread.join(5.0)

    def forget(self) -> None:
        """In a forked child: drop the connection."""
        if self._channel is not None:
            self._channel.abandon()

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                with self._where.connect(ATTEMPT_S) as self._channel:
                    _check_server(self._channel)
                    self._beat_until_closed(self._channel)
            except (PacelineError, OSError):  # the request connection reports the error
                self._closing.wait(self._beat_s)

    def _beat_until_closed(self, channel: Channel) -> None:
        worker, secret = self._owner.identity()
        channel.adjust(limit=0)
        channel.send(wire.PULSE, (worker,), note=secret, deadline_s=self._silence_s)
        self._owner.known(self._take(channel, wire.WELCOME))
        while not self._closing.is_set():
            step, doing = self._owner.beat()
            channel.send(wire.BEAT, (step,), note=doing[:500], deadline_s=self._silence_s)
            self._take(channel, wire.BEATEN)
            self._owner.beaten()
            self._now.wait(self._beat_s)
            self._now.clear()

    def _take(self, channel: Channel, kind: int) -> Frame:
        frame = channel.receive(deadline_s=self._silence_s)
        if frame.kind != kind:
            raise Closed(f"a heartbeat was answered with a frame of kind {frame.kind}")
        return frame


_HEARTBEATS: weakref.WeakSet[Heartbeats] = weakref.WeakSet()


def _after_fork() -> None:
    for connection in list(_CONNECTIONS):
        connection.forget()
    for heartbeats in list(_HEARTBEATS):
        heartbeats.forget()


os.register_at_fork(after_in_child=_after_fork)
