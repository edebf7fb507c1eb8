# SPDX-License-Identifier: Apache-2.0
"""The state machine's record of a worker, its messages to it, and a worker's commit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.data.ledger.epoch_ledger import Mark
from paceline.flow.control.messages import WorkerAddress


class ControlMessage(NamedTuple):
    """A message to a worker, or an event.

    Attributes:
        worker: its receiver; None: an event for the log.
        kind: its kind.
        serial: of the request that it answers, 0 for none.
        numbers: of the frame.
        note: serializable as JSON.
    """

    worker: int | None
    kind: str
    serial: int = 0
    numbers: tuple[int, ...] = ()
    note: Any = None


@dataclass(frozen=True)
class Commit:
    """A worker has completed an exchange.

    Attributes:
        serial: of its request.
        marks: the places whose work went into it.
        facts: further facts, for the status.
        returned: places whose work was left out of it.
        wanted: members that the run wants from then on; 0: as many as there are.
    """

    serial: int
    marks: list[Mark]
    facts: dict[str, Any]
    returned: list[Mark] = field(default_factory=list)
    wanted: int = 0


@dataclass
class WorkerRecord:
    """A live worker.

    Attributes:
        place: its number and address.
        secret: it must present it to reconnect.
        seen: time of its last sign of life.
        member: whether it is a member; else it waits to join.
        holds: whether it holds the state of the last committed exchange.
        absent: since when a restarted server waits for it; None: it is connected.
        told: the last of its numbered messages that were carried out.
        asked: the last of its questions that was answered.
        started: the highest exchange that it has reached.
        called: the highest to which it was called.
        late: it joined after other members had reached an exchange.
        dry: it asked for data, has none left, and got none.
        left: it has ended its pass before the epoch was over.
        waits: it waits for other members, as at a checkpoint.
        held: it waits to join, and was told that the run wants no more members at present.
        wrong: its messages that contradicted other workers.
        commit: its commit of the current exchange.
        failed: the serial of its complaint about the current exchange.
        doing: its activity, in its own words.
        since: since when.
        step: its training steps.
    """

    place: WorkerAddress
    secret: str
    seen: float
    member: bool = False
    holds: bool = False
    absent: float | None = None
    told: int = 0
    asked: int = 0
    started: int = 0
    called: int = 0
    late: bool = False
    dry: bool = False
    left: bool = False
    waits: bool = False
    held: bool = False
    wrong: int = 0
    commit: Commit | None = None
    failed: int | None = None
    doing: str = ""
    since: float = 0.0
    step: int = 0

    @property
    def worker(self) -> int:
        """Its number."""
        return self.place.worker

    @property
    def name(self) -> str:
        """For messages."""
        return f"worker {self.worker} on {self.place.host}"

    @property
    def idle(self) -> bool:
        """Whether an exchange would not interrupt it."""
        return self.dry or self.left or self.waits


def activity(one: WorkerRecord, now: float) -> dict[str, Any]:
    """What a worker does, and since when; serializable as JSON."""
    return {
        "worker": one.worker,
        "host": one.place.host,
        "member": one.member,
        "doing": one.doing,
        "for_s": round(now - one.since, 3),
        "step": one.step,
        "silent_s": round(now - one.seen, 3),
        "came_to": one.started,
        "called_to": one.called,
        "commits": one.commit is not None,
        "absent": one.absent is not None,
    }


def nearest_donor(chosen: Sequence[WorkerRecord]) -> int | None:
    """The member that sends the state to those without it: of the site of most of them, else the first; None if no
    member holds it."""
    without = Counter(one.place.site for one in chosen if not one.holds)
    holders = [one for one in chosen if one.holds]
    return max(holders, key=lambda one: without[one.place.site]).worker if holders else None
