# SPDX-License-Identifier: Apache-2.0
"""A worker's client of the control plane: it joins, commits exchanges, reports failures, and asks for data.

Only the training thread makes these calls, except where noted. Every wait has a deadline, and its error names what was
missing. A restart of the launcher costs time and is otherwise transparent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.communication.sockets.channel import TLS, Channel, Frame
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.data.ledger.ranges import Ranges
from paceline.errors import LEFT, ClosedError, MismatchError, PacelineError, PeerLostError
from paceline.flow.control import validation, wire
from paceline.flow.control.client_connection import (
    ClientConnection,
    ConnectionEvents,
    ControlAddress,
    FrameParts,
    Heartbeats,
    given_up,
)
from paceline.flow.control.ledger import NOTHING, OVER, WORK
from paceline.flow.control.messages import About, CommitOutcome, Generation

GOODBYE_S = 30.0
"""Seconds to wait for the answer to a goodbye."""
LEAVE_LOOK_S = 0.5
"""Below the quorum: seconds between two looks at whether this worker is to leave."""
_ANSWERS = {NOTHING: "nothing", WORK: "work", OVER: "over"}
_LOG = logging.getLogger("paceline.control")


class HeldLeases:
    """Unsettled leases: neither committed nor given back."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Ranges] = {}

    def add(self, mark: Mark) -> None:
        """Add a lease."""
        loader, epoch, begin, end = mark
        self._held.setdefault((loader, epoch), Ranges()).add(begin, end)

    def settle(self, marks: Iterable[Sequence[int]]) -> None:
        """These are committed or given back."""
        for loader, epoch, begin, end in marks:
            held = self._held.get((loader, epoch))
            if held is not None:
                held.remove(begin, end)
                if not held:
                    del self._held[loader, epoch]

    def clear(self) -> None:
        """Drop all leases."""
        self._held.clear()

    def marks(self) -> list[Mark]:
        """All held leases."""
        return [(*key, begin, end) for key, held in self._held.items() for begin, end in held]


class ControlClient:
    """One worker of an elastic run.

    Args:
        address: of the control plane.
        port: of the control plane.
        about: this worker's description of itself.
        tls: None for unencrypted connections.
        timeout_s: seconds for every wait, except for those below the quorum.
        dial: connects to the control plane, see `ControlAddress`; None: directly.

    Attributes:
        worker: its number; it is final once :meth:`enter` has returned.
        run: the name of the run.
        generation: the newest known; its number is 0 before this worker is a member.
        called: the highest exchange to which this worker was called, 0 for none.
        paused: why the run waits for workers; "" if it does not.
        held: why this worker waits to become a member, with no limit while the control plane answers; "" if it does
            not.
        most: the most members that the user allows.
        saves: whether this worker writes a checkpoint while the run waits.
        leaves: set when this worker is to leave in order; waits below the quorum then end with SystemExit.
        left: whether this worker has left before the end.

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
        self.worker, self._secret, self.run = -1, "", ""
        self.generation = Generation()
        self.called = 0
        self.paused = self.held = ""
        self.most = 0
        self.saves = False
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
        self.leaves = self.left = self._gone = False
        self._trains = runtime.current_thread()
        self._goodbye: int | None = None  # while it waits for the answer to one
        self._alone: int | None = None
        self._changed = runtime.Condition(runtime.RLock())
        self._calls: dict[str, Callable[[Any], None]] = {}
        self._terms: dict[str, float] = {}
        self._connection = ClientConnection(where, timeout_s, self._events())
        beat_s, silence_s = self._terms["beat_s"], self._terms["silence_s"]
        self._heartbeats = Heartbeats(where, self._identity, self._known, self._beat, self._beaten, (beat_s, silence_s))
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

        Args:
            generation: of the exchange.
            exchange: its number.
            marks: the places whose work by this worker went into it.
            facts: further facts for the status; small.
            returned: places of its leases whose work was rejected.
            wanted: members that the run wants from then on; the same on all members. 0: as many as there are.

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
        """This joining worker holds the donor's state, the common start, or a checkpoint.

        Args:
            generation: in which it got the state.
            exchanges: number of exchanges in the model.
            wanted: members that the run wanted at the checkpoint that has the state; 0: it does not say.
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

    def _events(self) -> ConnectionEvents:
        return ConnectionEvents(self.hello, self.welcome, self.may_rejoin, self.to_resend, self.received, self.ended)

    def _identity(self) -> tuple[int, str]:
        return self.worker, self._secret

    def _beat(self) -> tuple[int, str]:
        return max(0, self._step), self._doing

    def _known(self, frame: Frame) -> None:
        """Heartbeats are welcome: to another server, if its machine lost power and the connection has not noticed."""
        start = validation.table(frame.note or {}, "a welcome").get("start", self._start)
        with self._changed:
            gone = start != self._start
        if gone:
            self._connection.renew()

    def _beaten(self) -> None:
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
