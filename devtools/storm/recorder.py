# SPDX-License-Identifier: Apache-2.0
"""The flight tape: what a replay of an elastic run needs, as events of the control plane's log.

The log says by itself who joined, was lost, left and came back, and which generations there were. Added here are

    tape      version, terms, generation, exchange: one for each start of the control plane
    program   rule, numbers (parameters): when the first worker has joined
    data      loader, epoch, total, unit, most: once for each, as the workers ask
    exchange  exchange, generation, and of each member [worker, seconds from its coming to the commit, minibatches,
              places, leases since its last commit, bytes sent, seconds on the wire]
    accused   worker, generation, suspects: a complaint about an exchange

and to each `lost` the last exchange that the worker came to (`came`), the last one that it has reported complete
(`reported`), and the seconds since then (`after_s`). An exchange takes about 40 bytes for each member, so that eight
members with an exchange a second write one or two megabytes an hour.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from paceline.communication.sockets.channel import Frame
from paceline.core import runtime
from paceline.flow.control import wire
from paceline.flow.control.members import ControlMessage
from paceline.flow.control.messages import Terms
from paceline.flow.control.server import ControlServer
from paceline.flow.control.state_machine import StateMachine

VERSION = 1


@dataclass
class _Progress:
    """Where a worker is."""

    came: int = 0
    reported: int = 0
    acted_at: float = 0.0
    came_at: float = 0.0
    leases: int = 0
    row: tuple[int, int, int, float] = (0, 0, 0, 0.0)  # minibatches, places, bytes sent, seconds on the wire


def _number(facts: Mapping[str, Any], name: str) -> float:
    """What a worker reports of itself; 0 for anything that is no number."""
    value = facts.get(name, 0)
    return value if type(value) in (int, float) and 0 <= value < 1 << 53 else 0


class FlightRecorder:
    """Tells the log.

    Args:
        tell: gets events, as (kind, about).
    """

    def __init__(self, tell: Callable[[str, dict[str, Any]], None]) -> None:
        self._tell = tell
        self._workers: dict[int, _Progress] = {}
        self._data: set[tuple[int, ...]] = set()
        self._exchange = 0
        self._program = False

    def begin(self, machine: StateMachine, terms: Terms) -> None:
        """The control plane begins, or begins again."""
        self._exchange = machine.exchange
        about = {"generation": machine.generation.number, "exchange": machine.exchange}
        self._tell("tape", {"version": VERSION, "terms": asdict(terms), **about})

    def frame(self, machine: StateMachine, worker: int, frame: Frame, now: float) -> None:
        """A worker's frame was carried out."""
        one = self._workers.setdefault(worker, _Progress(acted_at=now))
        if frame.kind == wire.STARTS:
            if frame.numbers[0] > one.came:
                one.came, one.came_at, one.acted_at = frame.numbers[0], now, now
        elif frame.kind == wire.COMMIT:
            facts = frame.note.get("facts", {})
            places = sum(end - begin for *_, begin, end in frame.note["marks"])
            sent, wire_s = int(_number(facts, "sent")), float(_number(facts, "wire_s"))
            one.row = (int(_number(facts, "minibatches")), places, sent, wire_s)
            one.reported, one.acted_at = max(one.reported, frame.numbers[2]), now
        elif frame.kind == wire.FAILED:
            suspects = list(frame.note.get("suspects", []))
            self._tell("accused", {"worker": worker, "generation": frame.numbers[1], "suspects": suspects})
        elif frame.kind == wire.ASK:
            _, loader, epoch, total, unit, most, _, *_ = frame.numbers
            if (loader, epoch, total, unit) not in self._data:
                self._data.add((loader, epoch, total, unit))
                names = ("loader", "epoch", "total", "unit", "most")
                self._tell("data", dict(zip(names, (loader, epoch, total, unit, most), strict=True)))
        self._look(machine, now)

    def _look(self, machine: StateMachine, now: float) -> None:
        if machine.exchange > self._exchange:
            self._exchange = machine.exchange
            rows = []
            for worker, one in self._workers.items():
                if one.reported == self._exchange:
                    made, places, sent, wire_s = one.row
                    waited_s = round(max(0.0, now - one.came_at), 3)
                    rows.append([worker, waited_s, made, places, one.leases, sent, round(wire_s, 4)])
                    one.leases = 0
            about = {"exchange": self._exchange, "generation": machine.committed_in, "workers": rows}
            self._tell("exchange", about)

    def message(self, machine: StateMachine, outgoing: ControlMessage, now: float) -> None:
        """A message of the state machine; events go on to the log."""
        if outgoing.worker is not None:
            if outgoing.kind == "answer" and len(outgoing.numbers) > 1 and outgoing.worker in self._workers:
                self._workers[outgoing.worker].leases += 1
            return
        self._look(machine, now)
        about = outgoing.note
        if outgoing.kind == "joined":
            self._workers[about["worker"]] = _Progress(acted_at=now)
            if not self._program and machine.fingerprint is not None:
                self._program = True
                rule = str(machine.fingerprint.get("rule", ""))[:500]
                self._tell("program", {"rule": rule, "numbers": int(_number(machine.fingerprint, "numbers"))})
        elif outgoing.kind in ("lost", "left", "left early"):
            one = self._workers.pop(about["worker"], _Progress(acted_at=now))
            after_s = round(max(0.0, now - one.acted_at), 3)
            about = {**about, "came": one.came, "reported": one.reported, "after_s": after_s}
        self._tell(outgoing.kind, about)


class TapedControlServer(ControlServer):
    """A control plane whose log has the flight tape, too."""

    def start(self) -> None:
        """Accept workers; a restarted one begins the tape again."""
        self._recorder = FlightRecorder(self._tell)
        with self._turn():
            self._recorder.begin(self._machine, self._machine.terms)
        super().start()

    def _carry_out(self, worker: int, frame: Frame, now: float) -> None:
        super()._carry_out(worker, frame, now)
        self._recorder.frame(self._machine, worker, frame, now)

    def _log(self, one: ControlMessage) -> None:
        self._recorder.message(self._machine, one, runtime.monotonic())
