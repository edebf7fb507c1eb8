# SPDX-License-Identifier: Apache-2.0
"""Checks a worker's frames and hands them to the state machine."""

from __future__ import annotations

from paceline.communication.sockets.channel import Frame
from paceline.errors import MismatchError
from paceline.flow.control import leaving, validation, wire
from paceline.flow.control.state_machine import StateMachine
from paceline.flow.control.worker_record import Commit


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
            leaving.leave(machine, worker, first == wire.LEAVES_ANYWAY, now)
    else:
        serial = validation.whole(first, 1, validation.HUGE, "a serial number")
        if frame.kind == wire.COMMIT:
            said = validation.table(frame.note, "a commit")
            facts = validation.small(said.get("facts"), 1 << 12, "the facts of a commit")
            returned = validation.marks(said.get("returned", []))
            wanted = validation.whole(said.get("wanted", 0), 0, validation.WORKERS, "wanted workers")
            commit = Commit(serial, validation.marks(said.get("marks")), facts, returned, wanted)
            machine.commit(worker, *_whole(second, third), commit, now)
        elif frame.kind == wire.FAILED:
            said = validation.table(frame.note, "a complaint")
            why = validation.text(said.get("why"), validation.REASON, "why")
            suspects = validation.workers(said.get("suspects"))
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
