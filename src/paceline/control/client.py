# SPDX-License-Identifier: Apache-2.0
"""A worker's side of the control plane: it enters, commits exchanges, complains, and asks for data.

All calls are the training thread's unless they say otherwise. Those that wait end with an error that says what was
waited for. A launcher that ends and is started again is not noticed, except for the time it takes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from paceline.control import check, wire
from paceline.control.books import NOTHING, OVER, WORK
from paceline.control.errors import GivenUpError
from paceline.control.holdings import Holdings
from paceline.control.link import Link, Pulse, Said
from paceline.control.terms import About, Generation, Verdict
from paceline.data.book import Mark, Question
from paceline.errors import ClosedError, MismatchError, PacelineError, PeerLostError
from paceline.transport.channel import TLS, Frame

GOODBYE_S = 5.0
"""Seconds that a goodbye is waited for."""
_LOG = logging.getLogger("paceline.control")
_ANSWERS = {NOTHING: "nothing", WORK: "work", OVER: "over"}


class Member:
    """One worker of an elastic run.

    Args:
        address: of the control plane.
        port: of the control plane.
        about: what this worker says about itself.
        tls: None for connections in the clear.
        timeout_s: seconds for every wait, except for those below the quorum.

    Attributes:
        worker: its number; it is final once :meth:`enter` has returned.
        generation: the newest that is known; its number is 0 before this worker is a member.
        called: the highest exchange to which this worker was called, 0 for none.
        paused: why the run waits for workers; "" where it does not.

    Raises:
        RefusedError: this worker runs another program, there is no room, or the run is over.
        PeerLostError: the control plane cannot be reached.
    """

    def __init__(self, address: str, port: int, about: About, tls: TLS | None, timeout_s: float) -> None:
        self._about, self._timeout_s = about, timeout_s
        self.worker, self._secret = -1, ""
        self.generation = Generation()
        self.called = 0
        self.paused = ""
        self._started = 0
        self._state = -1  # the exchange whose state this worker holds
        self._news = 0
        self._seen_news = 0
        self._moved = time.monotonic()  # when a wait last had a reason to begin anew
        self._doing, self._step = "", 0
        self._serial = 0
        self._answers: dict[int, Frame] = {}
        self._holdings = Holdings()
        self._error: PacelineError | None = None
        self._gone = False
        self._changed = threading.Condition(threading.RLock())
        self._calls: dict[str, Callable[[Any], None]] = {}
        self._terms: dict[str, float] = {}
        self._link = Link((address, port), tls, timeout_s, self)
        beat_s, silence_s = self._terms["beat_s"], self._terms["silence_s"]
        self._pulse = Pulse((address, port), tls, self._identity, self._beat, beat_s, silence_s)
        self._link.start()

    # -- who is there -----------------------------------------------------------------------------

    def enter(self) -> Generation:
        """Wait until this worker is a member; the generation of which it is one."""
        self._wait(lambda: self.generation.rank(self.worker) is not None, "to be taken in", self._timeout_s)
        return self.generation

    def on_change(self, call: Callable[[Generation], None]) -> None:
        """`call` gets every newer generation as soon as it is known, in a thread of the client: it must not wait."""
        self._calls["generation"] = call

    def on_pause(self, call: Callable[[str], None]) -> None:
        """`call` gets why the run waits for workers, "" when it goes on, in a thread of the client."""
        self._calls["paused"] = call

    def on_end(self, call: Callable[[PacelineError], None]) -> None:
        """`call` gets the error with which this worker is out, in a thread of the client."""
        self._calls["end"] = call

    def doing(self, what: str, step: int) -> None:
        """What this worker does now: others hear it when they wait for it. Any thread; returns at once."""
        self._doing, self._step = what, step

    def leave(self) -> None:
        """Goodbye, at the end of the program."""
        self._pulse.close()
        if self._error is None:
            self._link.say(wire.BYE)
            with contextlib.suppress(PacelineError):
                self._wait(lambda: self._gone, "to say goodbye", min(GOODBYE_S, self._timeout_s))
        self.close()

    def close(self) -> None:
        """Without a goodbye: for the others this worker is dead."""
        with self._changed:
            self._error = self._error or ClosedError("this worker has left the run")
            self._changed.notify_all()
        self._pulse.close()
        self._link.close()

    # -- exchanges --------------------------------------------------------------------------------

    def starts(self, exchange: int) -> None:
        """This worker has come to an exchange and waits there. Returns at once."""
        self._check()
        with self._changed:
            self._started = max(self._started, exchange)
        self._link.say(wire.STARTS, (exchange,))

    def commit(
        self, generation: int, exchange: int, marks: list[Mark], facts: dict[str, Any], returned: Sequence[Mark] = ()
    ) -> Verdict:
        """This worker has come through the exchange; wait for all others.

        Args:
            generation: in which it was.
            exchange: its number.
            marks: the places whose work of this worker went into it.
            facts: what else others may want to see in the status; small.
            returned: places of its leases whose work was left out of the exchange.

        Raises:
            GivenUpError: this worker is out.
            PeerLostError: the control plane is.
        """
        with self._changed:
            if generation == self.generation.number and self._state != self.generation.exchange:
                raise MismatchError(
                    f"worker {self.worker} commits in generation {generation} without its state: take it from the "
                    "donor, then call holds_state"
                )
        note = {"marks": [list(one) for one in marks], "facts": facts, "returned": [list(one) for one in returned]}
        frame = self._request(wire.COMMIT, (generation, exchange), note, "for the others to commit", 2)
        return Verdict(frame.numbers[1] == 1, self._newest(frame))

    def failed(self, generation: int, why: str, suspects: Sequence[int]) -> Generation:
        """The exchange failed here; wait for a newer generation. `suspects` are numbers of workers."""
        note = {"why": why[: check.REASON], "suspects": list(suspects)}
        frame = self._request(wire.FAILED, (generation,), note, "for a new generation", 2)
        return self._newest(frame)

    def holds_state(self, generation: int) -> None:
        """This newcomer has the state that the donor gave, or everybody's common start."""
        self._check()
        with self._changed:
            if generation == self.generation.number:
                self._state = self.generation.exchange
        self._link.say(wire.HOLDS, (generation,))

    # -- the data ---------------------------------------------------------------------------------

    def ask(self, question: Question) -> tuple[str, Mark | None]:
        """("work", a lease), ("nothing", None) at present, or ("over", None) for everybody.

        Raises:
            MismatchError: the workers do not share the same data.
        """
        with self._changed:
            self._seen_news = self._news
        numbers = (question.loader, question.epoch, question.total, question.unit, question.most, int(question.dry))
        frame = self._request(wire.ASK, numbers, None, "for data", 1)
        kind, *mark = frame.numbers[1:6]
        if kind != WORK:
            return _ANSWERS[kind], None
        loader, epoch, begin, end = mark
        return "work", (loader, epoch, begin, end)

    def wait_news(self, timeout_s: float) -> bool:
        """Wait until :meth:`ask` may answer otherwise than the last time, or this worker is called; whether so."""
        with contextlib.suppress(TimeoutError):
            self._wait(lambda: self._news > self._seen_news, "for news", timeout_s, TimeoutError)
        return self._news > self._seen_news

    def tell(self, kind: str, *values: Any) -> None:
        """Returns at once; what is wrong with it, the next call that waits raises.

        "left" loader epoch marks; "ends" loader epoch total; "done" marks; "expect" loader epoch ranges; "waits" bool.
        """
        self._check()
        if kind == "holds":
            return  # said by itself whenever it is needed
        self._link.request(wire.TELL, (self._next(),), [kind, *values])

    def ledger(self) -> dict[str, Any]:
        """The state of the ledger as of the last commit."""
        said = self._request(wire.LEDGER, (), None, "for the ledger", 1).note
        return check.table(said, "a ledger")

    # -- within: waiting --------------------------------------------------------------------------

    def _next(self) -> int:
        with self._changed:
            self._serial += 1
            return self._serial

    def _request(self, kind: int, numbers: tuple[int, ...], note: Any, what: str, patience: float) -> Frame:
        self._check()
        serial = self._next()
        self._link.request(kind, (serial, *numbers), note)
        try:
            self._wait(lambda: serial in self._answers, what, patience * self._timeout_s)
        finally:
            self._link.answered(serial)
        frame = self._answers.pop(serial)
        if frame.kind == wire.SAID["wrong"]:
            raise MismatchError(check.text(frame.note, check.REASON, "what is wrong"))
        return frame

    def _wait(
        self,
        ready: Callable[[], bool],
        what: str,
        limit_s: float,
        error: type[Exception] = PeerLostError,
    ) -> None:
        """Wait; time below the quorum does not count, and has a limit of its own."""
        began = time.monotonic()
        with self._changed:
            while not ready():
                self._check()
                most = self._terms["quorum_s"] + self._timeout_s if self.paused else limit_s
                left = max(began, self._moved) + most - time.monotonic()
                if left <= 0:
                    doing = f"; the run waits for workers: {self.paused}" if self.paused else ""
                    raise error(f"worker {self.worker} waited {most:g} s {what} at {self._link.name}{doing}")
                self._changed.wait(left)

    def _check(self) -> None:
        if self._error is not None:
            raise type(self._error)(str(self._error))

    def _newest(self, frame: Frame) -> Generation:
        self._learn(Generation.read(frame.note))
        return self.generation

    # -- within: the connection's thread ------------------------------------------------------------

    def _identity(self) -> tuple[int, str]:
        return self.worker, self._secret

    def _beat(self) -> tuple[int, str]:
        return max(0, self._step), self._doing

    def hello(self) -> Said:
        """With what a connection begins."""
        with self._changed:
            if not self._secret:
                return wire.HELLO, (), self._about.note()
            note = {"secret": self._secret, "marks": self._holdings.marks()}
            return wire.BACK, (self.worker, self._state, self._started), note

    def again(self) -> list[Said]:
        """What may have been said while there was no connection."""
        with self._changed:
            said: list[Said] = [(wire.STARTS, (self._started,), None)] if self._started else []
            if self._state == self.generation.exchange:
                said.append((wire.HOLDS, (self.generation.number,), None))
            return said

    def afresh(self) -> bool:
        """Whether this worker can come as a new one."""
        with self._changed:
            if not self.generation.number:
                self._secret = ""
            return not self._secret

    def welcome(self, frame: Frame) -> None:
        """The answer to the hello."""
        said = check.table(frame.note, "a welcome")
        with self._changed:
            self.worker = frame.numbers[0]
            self._secret = str(said["secret"])
            self._terms = {name: float(said[name]) for name in ("beat_s", "silence_s", "quorum_s")}
            self._moved = time.monotonic()

    def heard(self, frame: Frame) -> None:
        """What the control plane says."""
        kind = wire.KINDS.get(frame.kind)
        if kind == "given_up":
            raise GivenUpError(check.text(frame.note, check.REASON, "why"))
        if kind == "generation":
            self._learn(Generation.read(frame.note))
        elif kind == "paused":
            self._pause(check.text(frame.note, check.REASON, "why"))
        elif kind == "check":
            self._pulse.prompt()
        elif kind in ("called", "news", "farewell"):
            with self._changed:
                self.called = max(self.called, frame.numbers[1]) if kind == "called" else self.called
                if kind == "farewell":
                    self._gone = True
                    self._link.finish()
                self._news += 1
                self._changed.notify_all()
        elif kind is not None:
            self._answered(kind, frame)
        else:
            raise MismatchError(f"the control plane says nothing of kind {frame.kind}")

    def _answered(self, kind: str, frame: Frame) -> None:
        """An answer to a request; what it says about what this worker holds counts from now on."""
        with self._changed:
            request = self._link.answered(frame.numbers[0])
            if request is None:
                return
            if kind == "answer" and frame.numbers[1] == WORK:
                loader, epoch, begin, end = frame.numbers[2:6]
                self._holdings.add((loader, epoch, begin, end))
            elif kind == "verdict" and frame.numbers[1]:
                self._holdings.settle(request[2]["marks"])
                self._state = request[1][2]
            elif request[0] == wire.TELL:
                if kind == "wrong":
                    raise MismatchError(check.text(frame.note, check.REASON, "what is wrong"))
                if request[2][0] in ("done", "left"):
                    self._holdings.settle(request[2][-1])
                return
            self._answers[frame.numbers[0]] = frame
            self._changed.notify_all()

    def _learn(self, generation: Generation) -> None:
        with self._changed:
            mine, theirs = self.generation, generation
            newer = theirs.number > mine.number
            if newer or (theirs.number == mine.number and theirs.exchange > mine.exchange):
                self.generation = theirs
                if self.worker in theirs.newcomers:
                    self._state = -1
                    if theirs.restored:
                        self._holdings.clear()
                self._moved = time.monotonic()
                self._news += 1
                self._changed.notify_all()
        if newer:
            self._call("generation", generation)

    def _pause(self, why: str) -> None:
        with self._changed:
            self.paused = why
            self._moved = time.monotonic()
            self._changed.notify_all()
        self._call("paused", why)

    def _call(self, name: str, value: Any) -> None:
        call = self._calls.get(name)
        if call is not None:
            try:
                call(value)
            except Exception:
                _LOG.exception("what hears of a change of the members has failed")

    def over(self, error: PacelineError) -> None:
        """The connection is lost for good."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()
        self._call("end", error)
