# SPDX-License-Identifier: Apache-2.0
"""The state machine of an elastic run: membership, and commits of exchanges. No sockets, no clock.

Every call reports an event at the time `now`. :attr:`outbox` then holds the messages that follow, and `dirty` tells to
write the record before they are sent. The rules:

1. Exchange k of generation g is committed when every live member of g has committed; a member that died after its
   commit counts.
2. If a member is lost before its commit, nothing is committed, and the survivors form a new generation.
3. Joining workers become members at a commit; at once if nothing was committed yet, or if the run waits for workers.
4. Below the quorum the run waits: no generation is formed.
5. If the number of members grows, no more become members than are wanted: at the start as many as the rule says, or the
   quorum if that is more. The others are held, and take the place of lost ones. All members report the wanted number
   alike with each commit.
6. A donor of state always holds it; a joining worker never sends state.

A call that raises MismatchError was invalid and has changed nothing: declare the worker that made it lost. Only a
question or a message about the data that contradicts other workers is answered ("wrong"), with the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.communication.sockets.identity import Identity
from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Question
from paceline.errors import GivenUpError, MismatchError, OverError, RefusedError
from paceline.flow.control.ledger import NOTHING, ControlLedger
from paceline.flow.control.members import (
    Admission,
    Commit,
    ControlOutbox,
    RollCall,
    StragglerCalls,
    Suspicion,
    WorkerRecord,
    activity,
    nearest_donor,
)
from paceline.flow.control.messages import About, Generation, Terms, WorkerAddress

OVER = "the run is over: its workers have come to the end of the program"
NOT_WANTED = "the run is over: this worker waited until it would be worth it, and was not needed"
HELD = "the run has as many workers as are worth it at present"
FEW, ADMIT_S = 64, 0.001
"""Before the first commit joining workers become members at once; with more than `FEW` members, `ADMIT_S` seconds for
each further one after the last change of the members, which all of them get."""
REMEMBERED = 1024
"""Number of lost workers whose reason is remembered."""
MOST_WRONG = 3
"""Messages of a worker that contradict other workers, after which it is put out if it has not ended by itself."""
RESTORES = 10
"""How many times in a row a run may resume from the same checkpoint after all its workers were lost."""


class StateMachine:
    """The state machine."""

    def __init__(self, terms: Terms, secret: Callable[[], str] = lambda: runtime.token_hex(16)) -> None:
        self.terms, self._secret = terms, secret  # draws what a worker must present to reconnect
        self.workers: dict[int, WorkerRecord] = {}  # number -> live worker, a member or waiting to join
        self.absent: set[int] = set()  # workers for which a restarted server waits
        self.generation = Generation()  # the newest; as of the last commit
        self.exchange = 0  # number of committed exchanges
        self.committed_in = 0
        self.recorded = (0, 0)  # generation and exchange of the record from which this server began
        self.broken = True  # whether the newest generation has lost a member, and the next one waits for workers
        self.dirty = False  # whether the record must be written before the outbox is sent
        self.paused = ""  # why the run waits; "" if it does not
        self.wanted = 0  # members that the run wants at present; 0: as many as there are
        self.finished = False  # whether a worker has finished its program
        self.ended = ""  # why no worker is accepted any more; "" during the run
        self.restores, self.restored_from = 0, -1  # times in a row from the checkpoint of that exchange
        self.reason = ""  # why the run waits for workers
        self.ledger = ControlLedger()
        self.calls = StragglerCalls(terms)
        self.roll = RollCall()  # the live members, with respect to the next exchange
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
        self.outbox = ControlOutbox()  # messages to send

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

    def leave(self, worker: int, anyway: bool, now: float) -> None:
        """A worker says goodbye before the end of its program: all of its work is committed.

        The last member that holds the state learns that, and may save it before it says goodbye again.

        Args:
            worker: its number.
            anyway: whether it leaves even if no other member holds the state.
            now: the time.
        """
        record = self.workers.get(worker)
        if record is None:
            return
        others = [one for one in self.members if one is not record]
        if record.holds and not anyway and not any(one.holds for one in others):
            self.outbox.send(worker, "alone", 0, (len(others),))
            return
        self.bye(worker, now, early=True)

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
        """
        revoked, holders = self.admission.revoke(workers, certificates, unknown, why)
        out = [one for one in holders if one in self.workers]
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

    # -- exchanges --------------------------------------------------------------------------------

    def starts(self, worker: int, exchange: int, now: float, leaves: bool = False) -> None:
        """A worker has reached an exchange, and waits there; if it leaves after it, all others are called."""
        record = self.member(worker)
        if exchange > self.exchange + 1:
            raise MismatchError(f"{record.name} comes to exchange {exchange}, the next one is {self.exchange + 1}")
        record.started = max(record.started, exchange)
        self.roll.note(record)
        self.calls.hurried = self.calls.hurried or (leaves and record.started > self.exchange)
        self.call(now)

    def commit(self, worker: int, generation: int, exchange: int, report: Commit, now: float) -> None:
        """A worker has completed exchange `exchange` of `generation`."""
        record = self.member(worker)
        current = self.generation.number
        if exchange == self.exchange and generation == self.committed_in:  # sent again: the answer was lost
            self.ledger.settled(worker, [*report.marks, *report.returned])
            self.hint()
            self.outbox.send(worker, "verdict", report.serial, (1,), self.generation.note())
        elif exchange != self.exchange + 1 or generation > current:
            raise MismatchError(
                f"{record.name} commits exchange {exchange} of generation {generation}; the next one is "
                f"{self.exchange + 1}, of generation {current}"
            )
        elif generation < current:
            self.outbox.send(worker, "verdict", report.serial, (0,), self.generation.note())
        elif not record.holds:
            raise MismatchError(f"{record.name} commits exchange {exchange}, but has not said that it holds the state")
        else:
            self._check_wanted(record, report.wanted)
            self.ledger.check(worker, [*report.marks, *report.returned])
            self.ledger.prepare(worker, report.marks)
            record.commit = report
            self.roll.note(record)
            self.call(now)
            self.conclude(now)

    def _check_wanted(self, record: WorkerRecord, wanted: int) -> None:
        """Refuse a number of wanted members where the rule has none, or that is less than before."""
        if wanted and not self.wanted:
            raise MismatchError(
                f"{record.name} reports that {wanted} workers are wanted after exchange {self.exchange + 1}, and the "
                "number of this run's workers does not grow"
            )

    def _outvoted(self, living: Sequence[WorkerRecord]) -> dict[int, str]:
        """Members that report another number of wanted members than most do, and why each is put out.

        All compute it from the same sums. Among equally many, those with the oldest member are right.
        """
        votes: dict[int, list[WorkerRecord]] = {}
        for one in living:
            assert one.commit is not None
            votes.setdefault(one.commit.wanted, []).append(one)
        if len(votes) == 1:
            return {}
        right = max(votes, key=lambda wanted: (len(votes[wanted]), -min(one.worker for one in votes[wanted])))
        names = ", ".join(one.name for one in votes[right])
        return {
            one.worker: f"it reports that {wanted} workers are wanted after exchange {self.exchange + 1}, and {names} "
            f"report{'s' if len(votes[right]) == 1 else ''} {right}"
            for wanted, voters in votes.items()
            for one in voters
            if wanted != right
        }

    def conclude(self, now: float) -> None:
        """Commit the exchange, if all live members have."""
        if self.broken or self.roll.missing or not self.roll.present:
            return
        living = self.members
        outvoted = self._outvoted(living)
        if outvoted:  # what they brought is in the sums, as that of a worker that dies after its commit
            for worker, why in outvoted.items():
                self.lost([worker], why, now)
            return
        self.ledger.merge()
        for one in [*living, *self.departed.values()]:
            self._give_back(one)
        for worker in self.departed:
            self.ledger.lost(worker)
        self._committed(living, now)

    def _give_back(self, one: WorkerRecord) -> None:
        """Return the places whose work was rejected, for another worker."""
        if one.commit is not None and one.commit.returned:
            skipped = self.ledger.give_back(one.worker, one.commit.returned)
            places = sum(end - begin for *_, begin, end in one.commit.returned)
            self.outbox.log("returned", worker=one.worker, places=places, skipped=skipped)

    def _committed(self, living: list[WorkerRecord], now: float) -> None:
        self.exchange += 1
        self.committed_in = self.generation.number
        self.dirty = True
        self.calls.over()
        self.suspicion.forget()
        self.ledger.save()
        first, report = living[0].worker, living[0].commit
        if report is not None:
            self.want(report.wanted, f"{len(living)} workers were worth {report.facts.get('effective', 'so many')}")
        self.generation = self.generation.committed(self.committed_in, self.exchange, first, self.wanted)
        serials = [(one, one.commit.serial) for one in living if one.commit is not None]
        for one in living:
            one.commit, one.holds, one.dry, one.late = None, True, False, False
        self.roll.begin(living, self.exchange + 1)
        gone, new = [one.name for one in self.departed.values()], [one.name for one in self.admitted(living)]
        self.departed.clear()
        before = self.outbox.take()
        if gone or new:
            lost = f"{', '.join(gone)} lost after its commit" if gone else ""
            came = f"{', '.join(new)} joined" if new else ""
            self.broken = True
            self._renew(living, "; ".join(one for one in (lost, came) if one), now)
        after = self.outbox.take()
        self.outbox.add(before)
        now_is = self.generation
        numbers = (1, now_is.number, now_is.exchange, first, now_is.wanted)
        note = None if now_is.number == self.committed_in else now_is.note()
        for one, serial in serials:  # first: a worker that is to save while the run waits must know the verdict
            self.outbox.send(one.worker, "verdict", serial, numbers, note)
        self.outbox.add(after)

    def _renew(self, living: list[WorkerRecord], reason: str, now: float) -> None:
        """Form the generation after a commit, with the workers that waited to join."""
        quorum = 1 if self.finished else self.terms.min_workers
        all_workers = [*living, *self.admitted(living)]
        if len(all_workers) < quorum:
            self.settle(now, reason)
        else:
            self.make(all_workers, reason, now)

    def holds_state(self, worker: int, generation: int, exchanges: int, now: float, wanted: int = 0) -> None:
        """A joining worker holds the state, the common start, or a checkpoint (see `ControlClient.holds_state`)."""
        record = self.member(worker)
        if generation == self.generation.number and not record.holds:  # else: start afresh
            first = len(self.roll.stateless) == len(self.roll.present)
            record.holds = self.dirty = True
            self.roll.note(record)
            self.outbox.log("holds", worker=worker, exchange=self.exchange)
            if first and self.generation.restored:
                self._restored(exchanges, now)
            self.want(wanted, "so many trained at the checkpoint")
            if self.wanted and not self.broken and not self.roll.stateless:
                self.settle(now, f"{self.wanted} workers are wanted")

    def _restored(self, exchanges: int, now: float) -> None:
        """All holders of the state were lost, and the run resumes from a checkpoint; count how often from the same."""
        further = exchanges > self.restored_from
        self.restores = 1 if further else self.restores + 1
        self.restored_from = max(self.restored_from, exchanges)
        if self.restores > RESTORES:
            where = f"from the one after exchange {exchanges}" if exchanges else "from the beginning"
            self.give_up(
                f"{RESTORES} times in a row all workers were lost before another checkpoint was written, and the run "
                f"went on {where}; see why they end, or write checkpoints more often",
                now,
            )

    def failed(self, worker: int, serial: int, generation: int, why: str, suspects: Sequence[int], now: float) -> None:
        """The current exchange failed at `worker`: form a new generation once it is known which members live."""
        record = self.member(worker)
        if generation > self.generation.number:
            raise MismatchError(
                f"{record.name} complains of generation {generation}, the newest is {self.generation.number}"
            )
        if generation < self.generation.number:
            self.outbox.send(worker, "newer", serial, note=self.generation.note())
            return
        record.failed = serial
        first, known = self.suspicion.since is None, set(self.generation.workers)
        if first:
            self.suspicion.begin(f"{record.name}: {why}", self.roll.present, now)
        self.suspicion.accuse(worker, known.intersection(suspects))
        if self.departed:
            self.break_off(why, now)
        elif not self.broken:
            for one in self.members if first else ():
                self.outbox.send(one.worker, "check")
            self._judge(now)

    def _judge(self, now: float) -> None:
        """Cancel the exchange, once it is known of each member whether it lives."""
        if self.suspicion.since is None or self.broken or self.suspicion.unheard:
            return
        accused = self.suspicion.again(self.roll.present)
        if accused is None:
            self.break_off(f"an exchange failed: {self.suspicion.why}", now)
        else:
            self.lost([accused], f"the others could not exchange with it, several times: {self.suspicion.why}", now)

    def sign_of_life(self, worker: int, now: float, doing: str | None = None, step: int = 0) -> None:
        """A worker has sent a frame or a heartbeat."""
        record = self.workers.get(worker)
        if record is None:
            return
        record.seen = max(record.seen, now)
        if doing is not None:
            if doing != record.doing:
                record.doing, record.since = doing, now
            record.step = step
        self.suspicion.heard(worker, now)
        self._judge(now)

    # -- the data ---------------------------------------------------------------------------------

    def ask(self, worker: int, serial: int, question: Question, now: float) -> None:
        """A worker asks for data."""
        record = self.member(worker)
        if serial <= record.asked:
            return
        record.asked = serial
        record.left = False
        record.started = min(record.started, self.exchange)  # it has left a cancelled exchange
        self.roll.note(record)
        if not record.holds or self.absent:
            self.outbox.send(worker, "answer", serial, (NOTHING,))
            return
        try:
            kind, mark = self.ledger.ask(worker, question, now)
        except MismatchError as error:
            self._wrong(record, error)
            self.outbox.send(worker, "wrong", serial, note=str(error))
            return
        record.dry = kind == NOTHING and question.dry
        self.roll.note(record)
        if record.dry:
            self.call(now)
        self.outbox.send(worker, "answer", serial, (kind, *(mark or ())))

    def tell(self, worker: int, serial: int, kind: str, values: Sequence[Any], now: float) -> None:
        """A worker's message about the data; a resent one is not carried out again."""
        record = self.member(worker)
        if record.commit is not None and serial > record.told and kind in ("left", "done"):
            raise MismatchError(f"{record.name} tells of places while its commit waits for the other members")
        if serial > record.told:
            try:
                self.ledger.tell(worker, kind, values)
            except MismatchError as error:
                record.told = serial
                self._wrong(record, error)
                self.outbox.send(worker, "wrong", serial, note=str(error))
                return
            record.told = serial
            record.left = record.left or kind == "left"
            if kind == "waits":
                record.waits = bool(values[0])
            self.roll.note(record)
            self.dirty = True
            self.hint()
            self.call(now)
        self.outbox.send(worker, "ack", serial)

    def _wrong(self, record: WorkerRecord, error: MismatchError) -> None:
        """A worker ends when it learns that it is wrong; one that goes on is put out."""
        record.wrong += 1
        if record.wrong > MOST_WRONG:
            raise MismatchError(f"{record.name} was told {MOST_WRONG} times that it is wrong, and goes on: {error}")

    def send_ledger(self, worker: int, serial: int) -> None:
        """A worker wants the ledger as of the last commit."""
        self.member(worker)
        self.outbox.send(worker, "books", serial, (self.exchange,), self.ledger.saved)

    # -- time -------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Time has passed."""
        silent = [one for one in self.workers.values() if one.absent is None and now - one.seen > self.terms.silence_s]
        for one in silent:
            self.lost([one.worker], f"it was silent for {now - one.seen:.1f} s", now)
        gone = [(one, self.workers[one].absent) for one in sorted(self.absent)]
        late = [one for one, since in gone if since is not None and now - since > self.terms.return_s]
        self.lost(late, "it did not come back after the control plane was started again", now)
        if self.broken:
            self.settle(now, "" if self.paused else "the time to wait for others is over")
            self._end(now)
            return
        if self.departed and now - self.departed_since > self.terms.silence_s:
            names = ", ".join(one.name for one in self.departed.values())
            self.break_off(f"{names} died after a commit that the others did not reach", now)
        if self.exchange == 0:
            self.settle(now, "workers have joined")
        self._judge(now)
        self.call(now)
        self._break_stuck(now)

    def _end(self, now: float) -> None:
        """Give up waiting for workers."""
        if self.waits_since is None or now - self.waits_since <= self.terms.quorum_s or self.ended:
            return
        self.give_up(f"the run waited {self.terms.quorum_s:g} s for workers, and gave up: {self.paused}", now)

    def give_up(self, why: str, now: float) -> None:
        """Accept no more workers, and dismiss all present ones."""
        self.ended = why
        self.outbox.log("ended", reason=why)
        self.lost(list(self.workers), why, now)

    def _break_stuck(self, now: float) -> None:
        """Declare stragglers lost for which members wait too long."""
        first, living = self.calls.first, self.members
        if first is None or self.broken or now - first <= self.terms.timeout_s:
            return
        absent = (self.roll.present - self.roll.come) or self.roll.missing
        missing = [one for one in living if one.worker in absent]
        waiting = [one for one in living if one.worker not in absent]
        dump = [activity(one, now) for one in self.workers.values()]
        self.outbox.log("stuck", exchange=self.exchange + 1, waited_s=round(now - first, 3), workers=dump)
        if missing and waiting:
            names = ", ".join(one.name for one in waiting)
            why = f"{names} waited {now - first:.1f} s for it at exchange {self.exchange + 1}"
            self.lost([one.worker for one in missing], why, now)
        else:
            self.break_off(f"exchange {self.exchange + 1} was not over within {self.terms.timeout_s:g} s", now)

    def forgive(self, gap_s: float) -> None:
        """The server itself was stopped for `gap_s` seconds: do not count them as a worker's silence."""
        for one in self.workers.values():
            one.seen += gap_s
            if one.absent is not None:
                one.absent += gap_s
        self.calls.away(gap_s)

    def status(self, now: float) -> dict[str, Any]:
        """The run's status; serializable as JSON."""
        return {
            "generation": self.generation.number,
            "exchange": self.exchange,
            "members": [activity(one, now) for one in self.workers.values() if one.member],
            "waiting": [activity(one, now) for one in self.waiting],
            "wanted": self.wanted,
            "held": sum(one.held for one in self.workers.values()),
            "paused": self.paused,
            "finished": self.finished,
            "ended": self.ended,
            "reason": self.generation.reason,
            "lost": len(self.gone),
            "strange_marks": self.ledger.strange,
        }
