# SPDX-License-Identifier: Apache-2.0
"""Membership of an elastic run, from one generation to the next: the base of the state machine.

When a member is lost, the survivors form a new generation. Joining workers wait for the next commit; they become
members at once if nothing was committed yet, or if the run waits for workers. Below the quorum the run waits, and no
generation is formed.

Where the number of members grows, only as many become members as are wanted: at the start as many as the rule says, or
the quorum if that is more. The others are held: they wait, whatever time that takes, and take the place of lost ones.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.communication.sockets.identity import Identity
from paceline.core import runtime
from paceline.errors import GivenUpError, MismatchError, OverError, RefusedError
from paceline.flow.control.admission import Admission
from paceline.flow.control.ledger import ControlLedger
from paceline.flow.control.messages import About, Generation, Terms, WorkerAddress
from paceline.flow.control.outbox import ControlOutbox
from paceline.flow.control.roll_call import RollCall
from paceline.flow.control.stragglers import StragglerCalls
from paceline.flow.control.suspicion import Suspicion
from paceline.flow.control.worker_record import WorkerRecord, nearest_donor

OVER = "the run is over: its workers have come to the end of the program"
NOT_WANTED = "the run is over: this worker waited until it would be worth it, and was not needed"
HELD = "the run has as many workers as are worth it at present"
FEW, ADMIT_S = 64, 0.001
"""Before the first commit joining workers become members at once; with more than `FEW` members, `ADMIT_S` seconds for
each further one after the last change of the members, which is told to all of them."""
REMEMBERED = 1024
"""Number of lost workers whose reason is remembered."""


class MembershipState(ABC):
    """The part of the state machine that tracks members.

    Args:
        terms: the user's settings.
        secret: draws the secret that a worker must present to reconnect.

    Attributes:
        workers: number -> live worker, a member or waiting to join.
        generation: the newest; as of the last commit.
        exchange: number of committed exchanges.
        broken: whether the newest generation has lost a member, and the next one waits for workers.
        dirty: whether the record must be written before the outbox is sent.
        outbox: messages to send.
        paused: why the run waits; "" if it does not.
        wanted: members that the run wants at present; 0: as many as there are.
        finished: whether a worker has finished its program.
        ended: why no worker is accepted any more; "" during the run.
        roll: the live members, with respect to the next exchange.
        absent: workers for which a restarted server waits.
    """

    def __init__(self, terms: Terms, secret: Callable[[], str] = lambda: runtime.token_hex(16)) -> None:
        self.terms, self._secret = terms, secret
        self.workers, self.absent = dict[int, WorkerRecord](), set[int]()
        self.generation = Generation()
        self.exchange = 0
        self.committed_in = 0
        self.recorded = (0, 0)  # generation and exchange of the record from which this server began
        self.broken = True
        self.dirty = False
        self.paused = ""
        self.wanted = 0
        self.finished = False
        self.ended = ""
        self.restores, self.restored_from = 0, -1  # times in a row from the checkpoint of that exchange
        self.reason = ""  # why the run waits for workers
        self.ledger = ControlLedger()
        self.calls, self.roll = StragglerCalls(terms), RollCall()
        self.suspicion = Suspicion()
        self.admission = Admission()
        self.gone: dict[int, str] = {}
        self.fingerprint: dict[str, Any] | None = None
        self.next_worker = 0
        self.run = runtime.token_hex(8)  # the name of this run, for all its workers and control planes
        self.waits_since: float | None = None  # below the quorum
        self.enough_since: float | None = None  # at the very start: above it
        self.departed: dict[int, WorkerRecord] = {}  # died after a commit that may still go through
        self._admits_at = self.departed_since = 0.0
        self._told_held = 0
        self.outbox = ControlOutbox()

    @property
    def members(self) -> list[WorkerRecord]:
        """The live members of the newest generation."""
        return [self.workers[one] for one in self.generation.workers if one in self.workers]

    @property
    def saver(self) -> int | None:
        """The worker that writes a checkpoint while the run waits: the first that holds the state."""
        return next((one.worker for one in self.members if one.holds), None)

    @property
    def waiting(self) -> list[WorkerRecord]:
        """Workers that wait to join."""
        return [one for one in self.workers.values() if not one.member]

    def admitted(self, members: Sequence[WorkerRecord]) -> list[WorkerRecord]:
        """The waiting workers that may join these members; the oldest come first."""
        if not self.wanted or (self.finished and not members):
            return self.waiting
        return [] if self.finished else self.waiting[: max(0, self.wanted - len(members))]

    @property
    def over(self) -> bool:
        """Whether the finished workers have left, and the present ones have no work left."""
        return self.ended == OVER

    # -- joining and leaving ----------------------------------------------------------------------

    def join(self, about: About, now: float, identity: Identity | None = None) -> WorkerRecord:
        """A worker joins; RefusedError if it cannot be accepted. `identity` is of its certificate, if there are any."""
        self.admission.check(identity)
        if self.over or self.finished:
            raise OverError(OVER)
        if self.ended:
            raise RefusedError(self.ended)
        self._compare(about.fingerprint, about.first)
        if len(self.workers) >= self.terms.max_workers:
            raise RefusedError(
                f"the run has {len(self.workers)} workers and takes no more: start it with a higher --elastic MIN:MAX"
            )
        certificate = identity.id if identity is not None else ""
        place = WorkerAddress(self.next_worker, about.host, about.address, about.port, certificate, about.relayed)
        self.next_worker += 1
        record = self.workers[place.worker] = WorkerRecord(place, self._secret(), now, since=now)
        self.admission.joined(place.worker, identity)
        self.dirty = True
        self.outbox.log("joined", worker=place.worker, host=place.host)
        self.settle(now, f"{record.name} has joined")
        self.tell_waiting()
        return record

    def _compare(self, fingerprint: dict[str, Any], first: int) -> None:
        if self.fingerprint is None or (not self.workers and self.exchange == 0):
            self.fingerprint, self.wanted = fingerprint, self.terms.bounded(first)
        for key in sorted({*fingerprint, *self.fingerprint}):
            mine, theirs = self.fingerprint.get(key), fingerprint.get(key)
            if mine != theirs:
                raise RefusedError(
                    f"this worker runs another program than the others: {key} is {theirs!r:.200} here and "
                    f"{mine!r:.200} there; start all workers with the same script and settings"
                )

    def bye(self, worker: int, now: float, early: bool = False) -> None:
        """A worker has finished its program; `early`: it leaves before that, in order."""
        record = self.workers.get(worker)
        if record is None:
            return
        self.finished = self.finished or (record.member and not early)
        self.outbox.log("left early" if early else "left", worker=worker, host=record.place.host)
        self.gone[worker] = "it has said goodbye"
        self.outbox.send(worker, "farewell")
        how = "has left in order" if early else "has come to the end of its program"
        self._remove([worker], f"{record.name} {how}", now)

    def revoke(self, workers: list[int], certificates: list[str], unknown: bool, why: str, now: float) -> list[int]:
        """Accept these certificates no more, and put out the workers that have them.

        Args:
            workers: whose certificates are revoked, also of lost ones.
            certificates: further ones, by their IDs.
            unknown: accept no certificate from now on that has not joined before.
            why: for messages.
            now: the time.

        Returns:
            The present workers that were put out.

        Raises:
            RefusedError: one of the workers has no certificate, or is not known; nothing is revoked then.
        """
        found, missing = self.admission.of_workers(workers)
        if missing:
            raise RefusedError(f"no certificate is known here of worker {missing[0]}")
        revoked = [*found, *certificates]
        self.admission.revoked |= dict.fromkeys(revoked, why)
        if unknown:
            self.admission.closed = why
        out = [one for one in self.admission.holders(revoked) if one in self.workers]
        self.dirty = True
        self.outbox.log("revoked", certificates=revoked, workers=out, unknown=unknown, why=why)
        self.lost(out, f"its certificate was revoked: {why}", now)
        return out

    def lost(self, workers: Iterable[int], why: str, now: float) -> None:
        """Workers have died, or are declared lost."""
        known = [one for one in workers if one in self.workers]
        for worker in known:
            self.gone[worker] = why
            self.outbox.log("lost", worker=worker, host=self.workers[worker].place.host, why=why)
            self.outbox.send(worker, "given_up", note=f"{self.workers[worker].name} was given up: {why}")
        while len(self.gone) > REMEMBERED:
            del self.gone[next(iter(self.gone))]
        if known:
            names = " and ".join(self.workers[one].name for one in known)
            self._remove(known, f"{names} {'was' if len(known) == 1 else 'were'} lost: {why}", now)

    def _remove(self, workers: list[int], reason: str, now: float) -> None:
        self.dirty = True
        broke = False
        for worker in workers:
            record = self.workers.pop(worker)
            self.roll.forget(worker)
            self.absent.discard(worker)
            if record.member and record.commit is not None and not self.broken:
                self.departed[worker] = record
                self.departed_since = now
                continue
            self.ledger.lost(worker)
            broke = broke or record.member
        if broke or (self.departed and self.suspicion.since is not None):
            self.break_off(reason, now)
        elif self.broken:
            self.settle(now, reason)
        elif self.departed:
            self.conclude(now)
        self.tell_waiting()
        self.hint()

    # -- a number of members that grows ------------------------------------------------------------

    def want(self, wanted: int, why: str) -> None:
        """From now on so many members are wanted, if that is more than before."""
        before, wanted = self.wanted, self.terms.bounded(wanted)
        if 0 < before < wanted:
            self.wanted, self.dirty = wanted, True
            self.outbox.log("grown", wanted=wanted, before=before, reason=why)

    def tell_waiting(self) -> None:
        """Tell workers beyond the wanted number that they are held, and those that are due that they are not."""
        if not self.wanted and not self._told_held:
            return  # none is held
        due = {one.worker for one in self.admitted(self.members)}
        for one in self.waiting:
            held = one.worker not in due
            if held != one.held:
                one.held = held
                self.outbox.send(one.worker, "held", note=HELD if held else "")
        count = sum(one.held for one in self.waiting)
        if count != self._told_held:
            self._told_held = count
            self.outbox.log("held", workers=count, wanted=self.wanted)

    def hint(self) -> None:
        """Tell workers without data to ask again."""
        for worker in sorted(self.roll.dry):
            self.workers[worker].dry = False
            self.roll.note(self.workers[worker])
            self.outbox.send(worker, "news")

    # -- generations ------------------------------------------------------------------------------

    def break_off(self, reason: str, now: float) -> None:
        """Cancel the current exchange: the live workers repeat it, if they reach the quorum."""
        self.broken = True
        self.settle(now, reason)

    def settle(self, now: float, reason: str) -> None:
        """Form a new generation if one is needed and the quorum is reached."""
        if not self.broken:
            begun, new = self.calls.first is not None or self.departed, self.admitted(self.members)
            if self.exchange == 0 and new and not begun and now >= self._admits_at:
                self.make([*self.members, *new], reason, now)
            return
        survivors = self.members
        workers = [*survivors, *self.admitted(survivors)]
        quorum = 1 if self.finished else self.terms.min_workers
        if len(workers) < quorum:
            self.reason = reason or self.reason
            self._pause(f"{len(workers)} of at least {quorum} workers are there ({self.reason})", now)
            return
        if self.generation.number == 0 and not self._may_begin(len(workers), now):
            return
        as_ever = self.exchange > 0 and any(one.holds for one in survivors) and not self.paused
        self.make(survivors if as_ever and len(survivors) >= quorum else workers, reason, now)

    def _may_begin(self, there: int, now: float) -> bool:
        """Whether the start may begin: the run first waits for the expected workers."""
        self._resume()
        self.enough_since = now if self.enough_since is None else self.enough_since
        most = min(self.wanted or self.terms.max_workers, self.terms.max_workers)
        all_there = there >= min(self.terms.expected or most, most)
        return all_there or now >= self.enough_since + self.terms.start_s

    def _pause(self, reason: str, now: float) -> None:
        self.enough_since = None
        if self.finished and not self.workers:
            return
        if reason == self.paused:
            return
        if not self.paused:
            self.waits_since = now
        self.outbox.log("paused", reason=reason)
        self.paused, saver = reason, self.saver
        for worker in self.workers:
            self.outbox.send(worker, "paused", numbers=(int(worker == saver),), note=reason)

    def _resume(self) -> None:
        if self.paused:
            self.paused, self.waits_since = "", None
            self.outbox.log("resumed")
            for worker in self.workers:
                self.outbox.send(worker, "paused", note="")

    def make(self, chosen: list[WorkerRecord], reason: str, now: float) -> None:
        """Form the next generation of these workers."""
        for worker in self.departed:
            self.ledger.lost(worker)
        self.departed.clear()
        chosen = sorted(chosen, key=lambda one: one.worker)
        restored = self.exchange > 0 and nearest_donor(chosen) is None
        if restored and self.finished:
            self._over()
            return
        if restored:
            self.ledger.reset()
        self.generation = Generation(
            self.generation.number + 1,
            tuple(one.place for one in chosen),
            self.exchange,
            frozenset(one.worker for one in chosen if not one.holds),
            nearest_donor(chosen),
            reason[:1000],
            self.wanted,
        )
        self._admits_at = now + ADMIT_S * max(0, len(chosen) - FEW)
        self.broken, self.dirty = False, True
        self._resume()
        self.outbox.log("generation", **self.generation.note())
        for one in chosen:
            one.late = one.late or (not one.member and self.calls.first is not None)
            one.member, one.held = True, False
        self._announce()
        self.roll.begin(chosen, self.exchange + 1)
        self.tell_waiting()
        self.suspicion.over()
        self.calls.again(now)
        self.call(now)

    def _over(self) -> None:
        """End the run: the finished workers have left, and the present ones joined too late to get the state."""
        self.ended = OVER
        for worker in list(self.workers):
            self.gone[worker] = why = NOT_WANTED if self.workers[worker].held else OVER
            self.outbox.send(worker, "given_up", numbers=(1,), note=why)
            del self.workers[worker]
        self.absent.clear()
        self.roll.begin((), self.exchange + 1)
        self.dirty = True

    def _announce(self) -> None:
        """Announce the generation to its members, and answer workers that wait for it."""
        note = self.generation.note()
        for one in self.members:
            self.outbox.send(one.worker, "generation", note=note)
            if one.commit is not None:
                self.outbox.send(one.worker, "verdict", one.commit.serial, (0,), note)
                self.ledger.abort(one.worker)
                one.commit = None
            if one.failed is not None:
                self.outbox.send(one.worker, "newer", one.failed, note=note)
                one.failed = None

    @abstractmethod
    def conclude(self, now: float) -> None:
        """Commit the current exchange, if all members have completed it."""

    def call(self, now: float) -> None:
        """Call the members that are due to join the exchange."""
        if self.broken:
            return

        def idles(worker: int) -> bool:
            return worker in self.roll.idle and not self.workers[worker].waits

        for worker in self.calls.due(self.roll, now, lambda: self.ledger.unmerged(idles)):
            one = self.workers[worker]
            one.called = self.exchange + 1
            self.roll.note(one)
            self.outbox.send(worker, "called", numbers=(one.called,))
            self.outbox.log("called", worker=worker, exchange=one.called)

    def member(self, worker: int) -> WorkerRecord:
        record = self.workers.get(worker)
        if record is None:
            raise GivenUpError(f"worker {worker} was given up: {self.gone.get(worker, 'it is not known here')}")
        if not record.member:
            raise MismatchError(f"{record.name} is no member yet")
        return record
