# SPDX-License-Identifier: Apache-2.0
"""The ledger: which places of an epoch are free, which are leased to whom, and whose work is in the global model.

An epoch of n samples is the places 0 .. n of its order. A place is free; or leased to a worker, who will train on it;
or done, when what was made of it has been applied to the global model - not when a batch was handed out. Every place
is in exactly one of the three::

    free --ask--> leased --done--> done
      ^             |
      +----lost-----+          what a lost worker held is free again

so that every sample of an epoch is consumed exactly once, however unevenly workers go on, leave and come. All of it is
a few ranges: as leases are taken from the front, what is done is nearly a prefix.

A lease is sized by the speed that was seen: a worker gets half of what its share of all workers' speed would be of the
rest, between one unit and `most` of them (one, until something was seen of it), so that leases become small towards the
end of an epoch and all come to it at nearly the same time (C. Polychronopoulos and D. Kuck, IEEE Trans. Computers,
1987: guided self-scheduling).

Nothing here waits or sends. One worker keeps the ledger (:mod:`paceline.update.server`); marks reach it inside the
pushes that they are about, so that a push and its mark are applied together or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Any

from paceline.data.ledger.epoch_ledger import ENDLESS, EpochLedger, Mark, Question, Speeds
from paceline.data.ledger.epochs import Epochs
from paceline.data.ledger.history import History
from paceline.data.ledger.ranges import Ranges
from paceline.errors import MismatchError


class Ledger:
    """The books of all shared loaders.

    Attributes:
        lock: for those who share it between threads; nothing here takes it.
        repeated: places that were marked though they were done already, or somebody else's.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._epochs = Epochs()
        self._at: dict[tuple[int, int], int] = {}  # (loader, worker) -> the epoch in which it asked last
        self._waiting: set[int] = set()
        self._history = History()
        self._speeds = Speeds()
        self.repeated = 0

    # -- what workers say -------------------------------------------------------------------------

    def ask(self, worker: int, question: Question, now: float = 0.0) -> Mark | None:
        """Lease places to `worker`.

        Returns:
            The lease, as a mark; of an earlier epoch where a lost worker left some. None where nothing is free now:
            then :meth:`over` says whether more may come.
        """
        self._at[question.loader, worker] = question.epoch
        slowest = min(epoch for (one, _), epoch in self._at.items() if one == question.loader)
        self._epochs.close_left(question.loader, slowest)
        ledger = self._open(question)
        for (loader, epoch), earlier in sorted(self._epochs, key=lambda one: one[0]):
            if loader == question.loader and epoch < question.epoch and not earlier.left and earlier.free:
                return self._lease(worker, loader, epoch, earlier, question, now)
        if ledger is not None and ledger.free:
            return self._lease(worker, question.loader, question.epoch, ledger, question, now)
        if ledger is not None and question.dry:
            ledger.dry.add(worker)
        return None

    def over(self, loader: int, epoch: int) -> bool:
        """Whether the epoch holds nothing for anybody any more."""
        ledger = self._epochs.get(loader, epoch)
        if ledger is None:
            return self._epochs.is_over(loader, epoch)
        return not ledger.free and not self.holders(loader, epoch)

    def waits(self, worker: int, now: bool) -> None:
        """Whether `worker` waits for the others, as at a checkpoint: what it holds is not to be waited for."""
        if now:
            self._waiting.add(worker)
        else:
            self._waiting.discard(worker)

    def holders(self, loader: int, epoch: int) -> list[int]:
        """Workers that are at work on places of the epoch, and may yet be lost with them."""
        ledger = self._epochs.get(loader, epoch)
        if ledger is None:
            return []
        return [rank for rank, held in ledger.leased.items() if held and rank not in ledger.dry | self._waiting]

    def settled(self, loader: int, epoch: int) -> bool:
        """Whether all of the epoch is done: unlike :meth:`over`, work that was not applied yet counts as missing."""
        ledger = self._epochs.get(loader, epoch)
        return ledger.settled if ledger is not None else self._epochs.is_over(loader, epoch)

    def extent(self, loader: int, epoch: int) -> tuple[int, int] | None:
        """The places of an epoch, and the end of the last that is done; None where it is not under way."""
        ledger = self._epochs.get(loader, epoch)
        return None if ledger is None else (ledger.total, max((end for _, end in ledger.done), default=0))

    def held(self, worker: int) -> list[Mark]:
        """The places that are leased to `worker`."""
        return [
            (loader, epoch, begin, end)
            for (loader, epoch), ledger in self._epochs
            for begin, end in ledger.leased.get(worker, Ranges())
        ]

    def done(self, worker: int, marks: Iterable[Sequence[int]]) -> int:
        """What `worker` made of these places has been applied to the global model; how many were not so before."""
        count = 0
        for loader, epoch, begin, end in marks:
            ledger = self._epochs.get(loader, epoch)
            if ledger is None:
                self.repeated += end - begin
                continue
            found = ledger.leased[worker].remove(begin, end) if worker in ledger.leased else 0
            if found < end - begin:  # its lease went back to the pile meanwhile
                found += ledger.free.remove(begin, end)
            self.repeated += end - begin - found
            count += found
            self._history.add(loader, epoch, begin, end, ledger)
            self._speeds.marked(loader, worker, found)
            self._epochs.close_settled(loader)
        return count

    def give_back(self, worker: int, marks: Iterable[Sequence[int]]) -> None:
        """`worker` will not train on these places of its leases."""
        for loader, epoch, begin, end in marks:
            ledger = self._epochs.get(loader, epoch)
            if ledger is not None and worker in ledger.leased:
                for low, high in ledger.leased[worker].within(begin, end):
                    ledger.leased[worker].remove(low, high)
                    ledger.free.add(low, high)

    def leave_early(self, worker: int, loader: int, epoch: int, marks: Iterable[Sequence[int]]) -> None:
        """`worker` ends its pass before the epoch does, because its program wants so."""
        self.give_back(worker, marks)
        ledger = self._epochs.get(loader, epoch)
        if ledger is not None:
            ledger.left = True
            self._history.add(loader, epoch, 0, 0, ledger)

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only `total` places in this epoch."""
        ledger = self._epochs.get(loader, epoch)
        if ledger is not None and total < ledger.total:
            ledger.shorten(total)
            self._history.add(loader, epoch, 0, 0, ledger)
            self._epochs.close_settled(loader)

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places are to be done: the others were, by workers of an earlier run.

        Where there are none, it is over, and so are all before it of which nothing is expected.
        """
        self._epochs.expect(loader, epoch, rest)

    def lost(self, worker: int) -> None:
        """A worker is gone: what it held and did not mark is free again."""
        for ledger in self._epochs.ledgers():
            for begin, end in ledger.leased.pop(worker, Ranges()):
                ledger.free.add(begin, end)
            ledger.dry.discard(worker)
        self._waiting.discard(worker)
        self._speeds.lost(worker)
        self._at = {key: epoch for key, epoch in self._at.items() if key[1] != worker}

    def holds(self, worker: int, marks: Iterable[Sequence[int]]) -> None:
        """What `worker` holds is exactly this: a new keeper hears it from those who live.

        An epoch that has begun since the keeper's copy was made is opened; how long it is will be told by the next
        question.
        """
        self.lost(worker)
        for loader, epoch, begin, end in marks:
            ledger = self._epochs.get(loader, epoch)
            if ledger is None and not self._epochs.is_over(loader, epoch):
                ledger = self._epochs.begin((loader, epoch), ENDLESS)
            if ledger is None:
                continue
            for low, high in ledger.free.within(begin, end):
                ledger.free.remove(low, high)
                ledger.leased.setdefault(worker, Ranges()).add(low, high)

    # -- replicas ---------------------------------------------------------------------------------

    def news(self, reader: int) -> Any:
        """What `reader` does not know of what is done, for :meth:`learn`; JSON's terms, None where it is nothing."""
        missing = self._history.missing(reader)
        if missing is None:
            return {"whole": self.state()} if self._epochs else None
        return missing or None

    def learn(self, news: Any) -> None:
        """Be as the keeper's ledger was; who holds what does not matter."""
        if isinstance(news, dict):
            self.load(news["whole"])
            self.forget_leases()
            return
        for loader, epoch, begin, end, total, left in news:
            if epoch <= self._epochs.closed(loader) and (loader, epoch) not in self._epochs:
                continue
            ledger = self._open(Question(loader, epoch, total))
            assert ledger is not None
            ledger.left = ledger.left or bool(left)
            ledger.free.remove(begin, end)
            self.ends(loader, epoch, total)
            self._epochs.close_settled(loader)

    def catch_up(self, state: dict[str, Any]) -> None:
        """Be as `state` says, unless what is known here is newer; both are copies of one ledger."""
        other = Ledger()
        other.load(state)
        if other._epochs.progress >= self._epochs.progress:
            self.load(state)

    # -- within -----------------------------------------------------------------------------------

    def _open(self, question: Question) -> EpochLedger | None:
        """The book of an epoch; None where the epoch is over."""
        key = (question.loader, question.epoch)
        for (loader, epoch), begun in self._epochs:
            if loader == question.loader and epoch <= question.epoch and begun.total == ENDLESS:
                self.ends(loader, epoch, question.total)
        ledger = self._epochs.get(*key)
        if ledger is None and not self._epochs.is_over(*key):
            ledger = self._epochs.begin(key, question.total)
        if ledger is not None and question.total != ledger.total and ENDLESS not in (question.total, ledger.total):
            raise MismatchError(
                f"workers do not share the same data: an epoch of loader {question.loader} has {ledger.total} samples "
                f"on one and {question.total} on another; give all workers the same data set and sampler"
            )
        return ledger

    def _lease(self, worker: int, loader: int, epoch: int, ledger: EpochLedger, question: Question, now: float) -> Mark:
        self._speeds.begin(loader, worker, now)
        units = self._speeds.fair_units(
            worker, question, -(-min(ledger.free.total, ledger.total) // question.unit), now
        )
        first = next(iter(ledger.free))[0]
        size = (first // question.unit + units) * question.unit - first
        taken = ledger.free.take(size)
        assert taken is not None
        ledger.leased.setdefault(worker, Ranges()).add(*taken)
        ledger.dry.discard(worker)
        return loader, epoch, *taken

    # -- checkpoints and replicas -----------------------------------------------------------------

    def unfinished(self, loader: int) -> dict[int, Ranges]:
        """epoch -> the places that are not done, of epochs that have begun or are expected; without those left early.

        An epoch that is over, and lies behind one that is not, has none.
        """
        return self._epochs.unfinished(loader)

    def closed(self, loader: int) -> int:
        """The last epoch that is over, and so are all before it that are not unfinished; -1 where none is."""
        return self._epochs.closed(loader)

    def state(self, now: float = 0.0) -> dict[str, Any]:
        """What a checkpoint or a replica holds; JSON's terms."""
        places = [[loader, rank, epoch] for (loader, rank), epoch in self._at.items()]
        epochs = self._epochs.state()
        return {
            "books": epochs["books"],
            "closed": epochs["closed"],
            "at": places,
            "expected": epochs["expected"],
            "speeds": self._speeds.state(),
            "now": now,
        }

    def load(self, state: dict[str, Any], now: float = 0.0) -> None:
        """Put back what `state` gave; `now` is the time of another clock, perhaps."""
        self._history.forget_readers()
        self._epochs.load(state)
        self._at = {(loader, rank): epoch for loader, rank, epoch in state["at"]}
        self._speeds.load(state["speeds"], now - state["now"])

    def forget_leases(self) -> None:
        """Everything that is not done is free: so a new keeper begins, before the living say what they hold."""
        for worker in sorted({rank for ledger in self._epochs.ledgers() for rank in ledger.leased}):
            self.lost(worker)
