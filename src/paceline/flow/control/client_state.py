# SPDX-License-Identifier: Apache-2.0
"""The client's state, updated by the control plane's messages: the base of the client."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from paceline.communication.sockets.channel import Frame
from paceline.core import runtime
from paceline.errors import MismatchError, PacelineError
from paceline.flow.control import validation, wire
from paceline.flow.control.client_connection import ClientConnection, ControlAddress, FrameParts, Heartbeats, given_up
from paceline.flow.control.held_leases import HeldLeases
from paceline.flow.control.ledger import WORK
from paceline.flow.control.messages import About, Generation

_LOG = logging.getLogger("paceline.control")


class ClientState:
    """Keeps the control plane's messages, which the connection's thread delivers.

    Args:
        where: the control plane is.
        about: this worker's description of itself.
        timeout_s: seconds for which it tries to reconnect.
    """

    def __init__(self, where: ControlAddress, about: About, timeout_s: float) -> None:
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
        self._moved = runtime.monotonic()  # when a wait's deadline last started anew
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
        self._connection = ClientConnection(where, timeout_s, self)
        beat_s, silence_s = self._terms["beat_s"], self._terms["silence_s"]
        self._heartbeats = Heartbeats(where, self._identity, self._known, self._beat, self._beaten, (beat_s, silence_s))

    def _identity(self) -> tuple[int, str]:
        return self.worker, self._secret

    def _beat(self) -> tuple[int, str]:
        return max(0, self._step), self._doing

    def _known(self, frame: Frame) -> None:
        """Heartbeats are welcome: to another server, if its machine lost power and nothing has told the connection."""
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
            said: list[FrameParts] = [(wire.STARTS, (self._started, int(self.leaves)), None)] if self._started else []
            if self._state == self.generation.exchange:
                said.append((wire.HOLDS, (self.generation.number, *self._checkpoint), None))
            return [*said, (wire.BYE, (self._goodbye,), None)] if self._goodbye is not None else said

    def may_rejoin(self) -> bool:
        """Whether this worker can join as a new one."""
        with self._changed:
            if not self.generation.number:
                self._secret = ""
            return not self._secret

    def welcome(self, frame: Frame) -> None:
        """The answer to the hello."""
        said = validation.table(frame.note, "a welcome")
        with self._changed:
            self.worker = frame.numbers[0]
            self._secret, self.run = str(said["secret"]), validation.text(said.get("run", ""), 64, "the name of a run")
            self._start = str(said.get("start", ""))
            self._terms = {name: float(said[name]) for name in ("beat_s", "silence_s", "quorum_s")}
            self.most = validation.whole(said.get("most", 0), 0, validation.WORKERS, "the most workers")
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
