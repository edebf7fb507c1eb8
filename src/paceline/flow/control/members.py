# SPDX-License-Identifier: Apache-2.0
"""What the state machine keeps of its workers: records, roll call, calls of stragglers, suspicion, and certificates.

Every worker is tied to the certificate with which it joined. It has to show the same one when it reconnects and for its
heartbeats, and the other members ask for it by its ID, so no other member can take its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.communication.sockets.identity import CONTROL, Identity
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import RefusedError
from paceline.flow.control.messages import Terms, WorkerAddress


class ControlMessage(NamedTuple):
    """A message to a worker, or an event."""

    worker: int | None  # its receiver; None: an event for the log
    kind: str  # its kind
    serial: int = 0  # of the request that it answers, 0 for none
    numbers: tuple[int, ...] = ()  # of the frame
    note: Any = None  # serializable as JSON


@dataclass(frozen=True)
class Commit:
    """A worker has completed an exchange."""

    serial: int  # of its request
    marks: list[Mark]  # the places whose work went into it
    facts: dict[str, Any]  # further facts, for the status
    returned: list[Mark] = field(default_factory=list)  # places whose work was rejected
    wanted: int = 0  # members that the run wants from then on; 0: as many as there are


@dataclass
class WorkerRecord:
    """A live worker."""

    place: WorkerAddress  # its number and address
    secret: str  # it must present it to reconnect
    seen: float  # time of its last sign of life
    member: bool = False  # whether it is a member; else it waits to join
    holds: bool = False  # whether it holds the state of the last committed exchange
    absent: float | None = None  # since when a restarted server waits for it; None: it is connected
    told: int = 0  # the last of its numbered messages that were carried out
    asked: int = 0  # the last of its questions that was answered
    started: int = 0  # the highest exchange that it has reached
    called: int = 0  # the highest to which it was called
    late: bool = False  # it joined after other members had reached an exchange
    dry: bool = False  # it asked for data, has none left, and got none
    left: bool = False  # it has ended its pass before the epoch was over
    waits: bool = False  # it waits for other members, as at a checkpoint
    held: bool = False  # it waits to join, and knows that the run wants no more members at present
    wrong: int = 0  # its messages that contradicted other workers
    commit: Commit | None = None  # its commit of the current exchange
    failed: int | None = None  # the serial of its complaint about the current exchange
    doing: str = ""  # its activity, in its own words
    since: float = 0.0  # since when
    step: int = 0  # its training steps

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


class ControlOutbox:
    """Messages in order, until the server takes them."""

    def __init__(self) -> None:
        self._answers: list[ControlMessage] = []

    def take(self) -> list[ControlMessage]:
        """Remove and return all messages, in order."""
        taken, self._answers = self._answers, []
        return taken

    def add(self, answers: Iterable[ControlMessage]) -> None:
        """Append these messages."""
        self._answers.extend(answers)

    def send(self, worker: int, kind: str, serial: int = 0, numbers: Iterable[int] = (), note: Any = None) -> None:
        """Append a message to a worker."""
        self._answers.append(ControlMessage(worker, kind, serial, tuple(numbers), note))

    def log(self, event: str, **about: Any) -> None:
        """Append an event for the log."""
        self._answers.append(ControlMessage(None, event, note=about))


class RollCall:
    """Numbers of live members; call `note` whenever a member's record has changed."""

    def __init__(self) -> None:
        self.begin((), 0)

    def begin(self, members: Iterable[WorkerRecord], exchange: int) -> None:
        """From now on of these members, and of this exchange."""
        rows = [(one.worker, one) for one in members]  # set by set, which for a thousand is faster than `note`
        self.exchange = exchange
        self.present = {worker for worker, _ in rows}  # all of them
        # have reached the exchange
        self.come = {worker for worker, one in rows if one.started >= exchange or one.commit is not None}
        self.idle = {worker for worker, one in rows if one.dry or one.left or one.waits}  # it would not interrupt them
        # were neither called to the exchange, nor have come by themselves; `due`: those that are idle or late
        self.uncalled = {worker for worker, one in rows if one.called < exchange and one.started < exchange}
        self.due = self.uncalled & (self.idle | {worker for worker, one in rows if one.late})
        self.missing = {worker for worker, one in rows if one.commit is None}  # have not committed
        self.stateless = {worker for worker, one in rows if not one.holds}
        self.dry = {worker for worker, one in rows if one.dry}  # asked for data and got none

    def note(self, one: WorkerRecord) -> None:
        """A member's record is new, or has changed."""
        worker, idle = one.worker, one.idle
        uncalled = one.called < self.exchange and one.started < self.exchange
        self.present.add(worker)
        _put(self.come, worker, one.started >= self.exchange or one.commit is not None)
        _put(self.idle, worker, idle)
        _put(self.uncalled, worker, uncalled)
        _put(self.due, worker, uncalled and (idle or one.late))
        _put(self.missing, worker, one.commit is None)
        _put(self.stateless, worker, not one.holds)
        _put(self.dry, worker, one.dry)

    def forget(self, worker: int) -> None:
        """It is lost, or has left."""
        for some in self.sets():
            some.discard(worker)

    def sets(self) -> tuple[set[int], ...]:
        """All of them."""
        return self.present, self.come, self.idle, self.uncalled, self.due, self.missing, self.stateless, self.dry


def _put(some: set[int], worker: int, into: bool) -> None:
    if into:
        some.add(worker)
    else:
        some.discard(worker)


class StragglerCalls:
    """The calls to one exchange after another.

    Args:
        terms: the user's settings.
    """

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self.first: float | None = None  # since when a member waits at the exchange; None: none does
        self.hurried = False  # whether a member waits there that leaves after it
        self._enough: float | None = None  # since when the quorum has reached it

    def over(self) -> None:
        """The exchange is committed."""
        self.first, self._enough, self.hurried = None, None, False

    def again(self, now: float) -> None:
        """The exchange restarts with other members."""
        if self.first is not None:
            self.first = now

    def away(self, gap_s: float) -> None:
        """Do not count `gap_s` seconds."""
        self.first = None if self.first is None else self.first + gap_s
        self._enough = None if self._enough is None else self._enough + gap_s

    def due(self, roll: RollCall, now: float, unmerged: Callable[[], bool]) -> list[int]:
        """The members to call now; each is called once.

        Args:
            roll: of the live members, for the next exchange.
            now: the time.
            unmerged: whether an idle member holds places whose work is in no commit.
        """
        called: Iterable[int] = ()
        if roll.come:
            self.first = now if self.first is None else self.first
            called = roll.uncalled if self.hurried or self._grace_is_over(len(roll.come), now) else roll.due
        else:
            self.over()
            if len(roll.idle) == len(roll.present) and unmerged():
                called = roll.uncalled
        return sorted(called)

    def _grace_is_over(self, started: int, now: float) -> bool:
        if self._terms.grace_s is None or started < self._terms.min_workers:
            return False
        self._enough = now if self._enough is None else self._enough
        return now >= self._enough + self._terms.grace_s


TIMES = 3
"""Failures of one exchange after which the most accused member is declared lost."""


class Suspicion:
    """The complaints about one exchange."""

    def __init__(self) -> None:
        self.since: float | None = None  # time of this generation's first complaint; None: there was none
        self.why = ""  # its reason
        self.unheard: set[int] = set()  # members that have given no sign of life since then
        self._failures = 0
        self._accusers: dict[int, set[int]] = {}

    def begin(self, why: str, members: Iterable[int], now: float) -> None:
        """The first complaint of a generation: each of its members has to give a sign of life."""
        self.since, self.why, self.unheard = now, why, set(members)

    def accuse(self, worker: int, suspects: Iterable[int]) -> None:
        """`worker`, which lives, accuses `suspects`."""
        self.unheard.discard(worker)
        for one in suspects:
            if one != worker:
                self._accusers.setdefault(one, set()).add(worker)

    def heard(self, worker: int, now: float) -> None:
        """A sign of life of a member."""
        if self.since is not None and now > self.since:
            self.unheard.discard(worker)

    def again(self, members: Set[int]) -> int | None:
        """The exchange failed, and all members live; returns the member to declare lost, after `TIMES` failures."""
        self._failures += 1
        accused = {one: len(by & members) for one, by in self._accusers.items() if one in members}
        if self._failures < TIMES or not any(accused.values()):
            return None
        return max(accused, key=lambda one: (accused[one], one))  # of two that accuse each other, the newer

    def over(self) -> None:
        """A new generation was formed."""
        self.since = None

    def forget(self) -> None:
        """The exchange is committed."""
        self.since, self._failures = None, 0
        self._accusers.clear()


REMEMBERED = 4096
"""Workers whose certificates are remembered, the newest."""


class Admission:
    """Keeps the certificates."""

    def __init__(self) -> None:
        self.revoked: dict[str, str] = {}  # ID -> why
        self.closed = ""  # why no certificate is accepted that has not joined before; empty if new ones are
        self._known: dict[int, tuple[str, str]] = {}  # worker -> ID and name of its certificate

    def check(self, identity: Identity | None) -> None:
        """RefusedError if a worker may not come with that certificate."""
        if identity is None:
            return
        if identity.role == CONTROL:
            raise RefusedError(f"{identity} claims to be a worker, and has the certificate of a control plane")
        if identity.id in self.revoked:
            raise RefusedError(f"{identity} is refused: its certificate was revoked: {self.revoked[identity.id]}")
        if self.closed and identity.id not in {one for one, _ in self._known.values()}:
            raise RefusedError(f"{identity} is refused: it is new, and no new certificates are accepted: {self.closed}")

    def joined(self, worker: int, identity: Identity | None) -> None:
        """A worker has joined."""
        if identity is not None:
            self._known[worker] = identity.id, str(identity)
            while len(self._known) > REMEMBERED:
                del self._known[next(iter(self._known))]

    def mismatch(self, worker: int, identity: Identity | None) -> str:
        """Why that certificate is not the one of `worker`; empty if it is."""
        known = self._known.get(worker)
        if identity is None or known is None or known[0] == identity.id:
            return ""
        return f"{identity} claims to be worker {worker}, which is {known[1]}"

    def revoke(
        self, workers: list[int], certificates: list[str], unknown: bool, why: str
    ) -> tuple[list[str], list[int]]:
        """Accept these certificates and those of these workers no more; all of them, and the workers that have one.

        Raises:
            RefusedError: one of the workers has no certificate, or is not known; nothing is revoked then.
        """
        missing = [one for one in workers if one not in self._known]
        if missing:
            raise RefusedError(f"no certificate is known here of worker {missing[0]}")
        revoked = [*(self._known[one][0] for one in workers), *certificates]
        self.revoked |= dict.fromkeys(revoked, why)
        self.closed = why if unknown else self.closed
        return revoked, [worker for worker, (one, _) in self._known.items() if one in revoked]

    def state(self) -> dict[str, Any]:
        """For the record."""
        known = [[worker, one, name] for worker, (one, name) in self._known.items()]
        return {"revoked": self.revoked, "closed": self.closed, "known": known}

    def load(self, state: dict[str, Any]) -> None:
        """Load a result of `state`; a record of an earlier version has none."""
        self.revoked = {str(one): str(why) for one, why in state.get("revoked", {}).items()}
        self.closed = str(state.get("closed", ""))
        self._known = {int(worker): (str(one), str(name)) for worker, one, name in state.get("known", [])}
