# SPDX-License-Identifier: Apache-2.0
"""A worker's client of the control plane: it joins, commits exchanges, reports failures, and asks for data.

Only the training thread makes these calls, except where noted. Every wait has a deadline, and its error names what was
missing. A restart of the launcher costs time and is otherwise transparent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from paceline.communication.sockets.channel import TLS, Channel, Frame
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark, Question
from paceline.errors import LEFT, ClosedError, MismatchError, PacelineError, PeerLostError
from paceline.flow.control import validation, wire
from paceline.flow.control.client_connection import ControlAddress
from paceline.flow.control.client_state import ClientState
from paceline.flow.control.ledger import NOTHING, OVER, WORK
from paceline.flow.control.messages import About, CommitOutcome, Generation

GOODBYE_S = 30.0
"""Seconds to wait for the answer to a goodbye."""
LEAVE_LOOK_S = 0.5
"""Below the quorum: seconds between two looks at whether this worker is to leave."""
_ANSWERS = {NOTHING: "nothing", WORK: "work", OVER: "over"}


class ControlClient(ClientState):
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
        super().__init__(ControlAddress(address, port, tls, dial), about, timeout_s)
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
            returned: places of its leases whose work was left out of the exchange.
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
            return  # sent automatically; or the goodbye has said it
        self.check()
        if kind == "left":  # at once: a server restarted after this message would lease them anew
            with self._changed:
                self._held_leases.settle(values[-1])
        self._connection.request(wire.TELL, (self._next(),), [kind, *values])

    def ledger(self) -> tuple[int, dict[str, Any]]:
        """The number of the last committed exchange, and the ledger's state as of that commit."""
        said = self._request(wire.LEDGER, (), None, "for the ledger", 1)
        return said.numbers[1], validation.table(said.note, "a ledger")

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
