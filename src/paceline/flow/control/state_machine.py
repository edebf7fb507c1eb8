# SPDX-License-Identifier: Apache-2.0
"""The state machine of an elastic run: membership, and commits of exchanges. No sockets, no clock.

Every call reports an event at the time `now`. :attr:`outbox` then holds the messages that follow, and `dirty` tells to
write the record before they are sent. The rules:

1. Exchange k of generation g is committed when every live member of g has committed; a member that died after its
   commit counts.
2. If a member is lost before its commit, nothing is committed, and the survivors form a new generation.
3. Joining workers become members at a commit; at once if nothing was committed yet, or if the run waits for workers.
4. Below the quorum the run waits: no generation is formed.
5. If the number of members grows, no more become members than are wanted; all members report that number alike with
   each commit.
6. A donor of state always holds it; a joining worker never sends state.

A call that raises MismatchError was invalid and has changed nothing: declare the worker that made it lost. Only a
question or a message about the data that contradicts other workers is answered ("wrong"), with the error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.data.ledger.epoch_ledger import Question
from paceline.errors import MismatchError
from paceline.flow.control.ledger import NOTHING
from paceline.flow.control.membership import MembershipState
from paceline.flow.control.worker_record import Commit, WorkerRecord, activity

MOST_WRONG = 3
"""Messages of a worker that contradict other workers, after which it is put out if it has not ended by itself."""
RESTORES = 10
"""How many times in a row a run may resume from the same checkpoint after all its workers were lost."""


class StateMachine(MembershipState):
    """The state machine."""

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

    def commit(self, worker: int, generation: int, exchange: int, said: Commit, now: float) -> None:
        """A worker has completed exchange `exchange` of `generation`."""
        record = self.member(worker)
        current = self.generation.number
        if exchange == self.exchange and generation == self.committed_in:  # sent again: the answer was lost
            self.ledger.settled(worker, [*said.marks, *said.returned])
            self.hint()
            self.outbox.send(worker, "verdict", said.serial, (1,), self.generation.note())
        elif exchange != self.exchange + 1 or generation > current:
            raise MismatchError(
                f"{record.name} commits exchange {exchange} of generation {generation}; the next one is "
                f"{self.exchange + 1}, of generation {current}"
            )
        elif generation < current:
            self.outbox.send(worker, "verdict", said.serial, (0,), self.generation.note())
        elif not record.holds:
            raise MismatchError(f"{record.name} commits exchange {exchange}, but has not said that it holds the state")
        else:
            self._check_wanted(record, said.wanted)
            self.ledger.check(worker, [*said.marks, *said.returned])
            self.ledger.prepare(worker, said.marks)
            record.commit = said
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
        """Return the places whose work was left out of the exchange, for another worker."""
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
        first, said = living[0].worker, living[0].commit
        if said is not None:
            self.want(said.wanted, f"{len(living)} workers were worth {said.facts.get('effective', 'so many')}")
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
        for one, serial in serials:  # first: a worker told to save while the run waits must know the verdict
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
        """A joining worker holds the state, the common start, or a checkpoint.

        Args:
            worker: its number.
            generation: in which it got the state.
            exchanges: of the checkpoint.
            now: the time.
            wanted: members that the run wanted at the checkpoint.
        """
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
        """A worker ends when it is told that it is wrong; one that goes on is put out."""
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
