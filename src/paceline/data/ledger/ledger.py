# SPDX-License-Identifier: Apache-2.0
"""The ledger: which places of an epoch are free, which are leased to which worker, and which are done.

An epoch of n samples is the places 0 .. n of its order. A place is free; or leased to a worker, which will train on it;
or done: its update has been applied to the global model (handing out the batch is not enough). Every place is in
exactly one of the three::

    free --ask--> leased --done--> done
      ^             |
      +----lost-----+          a lost worker's leases are free again

So every sample of an epoch is consumed exactly once, whatever the workers' speeds, and whichever join and leave. Leases
are taken from the front, so that what is done is nearly a prefix, and a few ranges describe it.

A lease is sized by measured speed: a worker gets half of its speed share of what remains, between one unit and `most`
(one, before its first mark). So leases shrink towards the end of an epoch, and all workers reach it at nearly the same
time (C. Polychronopoulos and D. Kuck, IEEE Trans. Computers, 1987: guided self-scheduling).

Where the model is in shards, a lost worker's last updates may be in some of them only. Places of which a shard says so
are leased again, but never together with others (:mod:`paceline.update.server.ledger_client`).

Nothing here waits or sends. One worker keeps the ledger (:mod:`paceline.update.server`). A mark travels inside the push
that it belongs to, so that both are applied, or neither.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import ENDLESS, EpochLedger, Mark, Question, Speeds
from paceline.data.ledger.ranges import Ranges
from paceline.errors import MismatchError


class Epochs:
    """The ledgers of the active epochs; keys are (loader, epoch)."""

    def __init__(self) -> None:
        self._ledgers: dict[tuple[int, int], EpochLedger] = {}
        self._closed: dict[int, int] = {}  # loader -> epochs up to it (incl.) are over, unless active or expected
        self._expected: dict[tuple[int, int], Ranges] = {}

    def __bool__(self) -> bool:
        return bool(self._ledgers or self._closed or self._expected)

    def __iter__(self) -> Iterator[tuple[tuple[int, int], EpochLedger]]:
        """Keys and ledgers, in the order in which the epochs began."""
        return iter(list(self._ledgers.items()))

    def ledgers(self) -> list[EpochLedger]:
        return list(self._ledgers.values())

    def get(self, loader: int, epoch: int) -> EpochLedger | None:
        return self._ledgers.get((loader, epoch))

    def is_over(self, loader: int, epoch: int) -> bool:
        """Whether an epoch is over; one that is active or expected is not."""
        key = (loader, epoch)
        return epoch <= self.closed(loader) and key not in self._expected and key not in self._ledgers

    def opened(self, loader: int, epoch: int, total: int) -> EpochLedger | None:
        """The ledger of an epoch, begun if necessary; None if the epoch is over."""
        ledger, key = self.get(loader, epoch), (loader, epoch)
        if ledger is None and not self.is_over(loader, epoch):
            rest = self._expected.pop(key, Ranges([(0, total)]))
            ledger = self._ledgers[key] = EpochLedger(total, Ranges(rest.within(0, total)))
        return ledger

    def expect(self, loader: int, epoch: int, rest: Ranges) -> None:
        """When this epoch begins, only these places remain: an earlier run did the rest.

        If there are none, it is over, as are all epochs before it of which nothing is expected.
        """
        if rest:
            self._expected[loader, epoch] = rest.copy()
        else:
            self._closed[loader] = max(self.closed(loader), epoch)

    def closed(self, loader: int) -> int:
        """The last epoch that is over, as are all before it that are not `unfinished`; -1 if none is."""
        return self._closed.get(loader, -1)

    def close_settled(self, loader: int) -> None:
        for key, ledger in sorted(self._ledgers.items()):
            if key[0] == loader and ledger.settled:
                self._close(key)

    def close_left(self, loader: int, slowest: int) -> None:
        """Close epochs before `slowest` that were left early and of which nothing is leased."""
        for key, ledger in sorted(self._ledgers.items()):
            if key[0] == loader and key[1] < slowest and ledger.left and not any(ledger.leased.values()):
                self._close(key)

    def _close(self, key: tuple[int, int]) -> None:
        del self._ledgers[key]
        self._closed[key[0]] = max(self.closed(key[0]), key[1])

    def unfinished(self, loader: int) -> dict[int, Ranges]:
        """epoch -> its remaining places, for active and expected epochs that were not left early.

        An epoch that is over, and comes after one that is not, maps to no places.
        """
        ranges = {epoch: rest for (one, epoch), rest in self._expected.items() if one == loader}
        for (one, epoch), ledger in self._ledgers.items():
            if one == loader and not ledger.left:
                ranges[epoch] = ledger.unfinished
        over = range(min(ranges, default=0), self.closed(loader) + 1) if ranges else range(0)
        return {epoch: Ranges() for epoch in over} | ranges

    @property
    def progress(self) -> tuple[int, int]:
        """(epochs that are over, places done in active ones): grows with the work done."""
        return sum(1 + epoch for epoch in self._closed.values()), sum(
            ledger.done.total for ledger in self._ledgers.values()
        )

    def state(self, workers: bool = True) -> dict[str, Any]:
        """State for a checkpoint or replica, as JSON values; without `workers`, all that is not done is free."""
        rows = [
            {
                "key": list(key),
                "total": ledger.total,
                "free": (ledger.free if workers else ledger.unfinished).state(),
                "leased": [[rank, held.state()] for rank, held in ledger.leased.items()] if workers else [],
                "dry": sorted(ledger.dry) if workers else [],
                "left": ledger.left,
            }
            for key, ledger in self._ledgers.items()
        ]
        closed = [list(pair) for pair in self._closed.items()]
        expected = [[list(key), rest.state()] for key, rest in self._expected.items()]
        return {"books": rows, "closed": closed, "expected": expected}

    def load(self, state: dict[str, Any]) -> None:
        self._ledgers = {
            (row["key"][0], row["key"][1]): EpochLedger(
                row["total"],
                Ranges(row["free"]),
                {rank: Ranges(held) for rank, held in row["leased"]},
                set(row["dry"]),
                left=row["left"],
            )
            for row in state["books"]
        }
        self._closed = {loader: epoch for loader, epoch in state["closed"]}
        self._expected = {(key[0], key[1]): Ranges(rest) for key, rest in state["expected"]}


HISTORY = 1024
"""Entries kept; a reader that lags by more gets the whole ledger."""


class History:
    """The last changes, and which of them each reader has."""

    def __init__(self) -> None:
        self._entries: deque[tuple[int, ...]] = deque(maxlen=HISTORY)
        self._number = 0  # of the last entry
        self._told: dict[int, int] = {}  # reader -> number of the last entry sent to it

    def add(self, loader: int, epoch: int, begin: int, end: int, ledger: EpochLedger) -> None:
        """Places begin .. end (excl.) are done; the epoch may have been shortened or left early."""
        self._number += 1
        self._entries.append((loader, epoch, begin, end, ledger.total, int(ledger.left)))

    def missing(self, reader: int) -> list[list[int]] | None:
        """The entries that `reader` lacks, marked as sent; None if it needs the whole ledger."""
        since, self._told[reader] = self._told.get(reader, -1), self._number
        missing = self._number - since
        if since < 0 or missing > len(self._entries):
            return None
        return [list(one) for one in islice(self._entries, len(self._entries) - missing, None)] if missing else []


class Ledger:
    """The epochs of all shared loaders.

    Attributes:
        lock: for callers that share the ledger between threads; nothing here takes it.
        epochs: the active ones.
        speeds: of the workers.
        repeated: places that were marked though they were done, or leased to another worker.
    """

    def __init__(self) -> None:
        self.lock = runtime.RLock()
        self.epochs = Epochs()
        self._at: dict[tuple[int, int], int] = {}  # (loader, worker) -> epoch of its last request
        self._waiting: set[int] = set()
        self._history = History()
        self.speeds = Speeds()
        self._pushed: dict[tuple[int, int], Ranges] = {}  # of epochs that are not over
        self.repeated = 0

    # -- requests and marks -----------------------------------------------------------------------

    def ask(self, worker: int, question: Question, now: float = 0.0) -> Mark | None:
        """Lease places to `worker`; of an earlier epoch, if a lost worker left some there.

        None if nothing is free now; :meth:`over` then says whether more may come.
        """
        self._at[question.loader, worker] = question.epoch
        if any(begun.left for begun in self.epochs.ledgers()):
            slowest = min(epoch for (one, _), epoch in self._at.items() if one == question.loader)
            self.epochs.close_left(question.loader, slowest)
        ledger = self._open(question)
        for (loader, epoch), earlier in sorted(self.epochs, key=lambda one: one[0]):
            if loader == question.loader and epoch < question.epoch and not earlier.left and earlier.free:
                return self._lease(worker, loader, epoch, earlier, question, now)
        if ledger is not None and ledger.free:
            return self._lease(worker, question.loader, question.epoch, ledger, question, now)
        if ledger is not None and question.dry:
            ledger.dry.add(worker)
        return None

    def over(self, loader: int, epoch: int) -> bool:
        """Whether no place of the epoch is free or may become free."""
        ledger = self.epochs.get(loader, epoch)
        if ledger is None:
            return self.epochs.is_over(loader, epoch)
        return not ledger.free and not self.holders(loader, epoch)

    def waits(self, worker: int, now: bool) -> None:
        """Whether `worker` waits at a barrier, such as a checkpoint; then no worker waits for its places."""
        if now:
            self._waiting.add(worker)
        else:
            self._waiting.discard(worker)

    def holders(self, loader: int, epoch: int) -> list[int]:
        """Workers that are training on places of the epoch, and may still be lost."""
        ledger = self.epochs.get(loader, epoch)
        if ledger is None:
            return []
        idle = ledger.dry | self._waiting
        return [rank for rank in ledger.leased if rank not in idle]

    def settled(self, loader: int, epoch: int) -> bool:
        """Whether all of the epoch is done, that is, applied; unlike in :meth:`over`, leases count as missing."""
        ledger = self.epochs.get(loader, epoch)
        return ledger.settled if ledger is not None else self.epochs.is_over(loader, epoch)

    def extent(self, loader: int, epoch: int) -> tuple[int, int] | None:
        """(places of an epoch, end of the last one that is done); None if it is not active."""
        ledger = self.epochs.get(loader, epoch)
        return None if ledger is None else (ledger.total, max((end for _, end in ledger.done), default=0))

    def newest(self, loader: int) -> int | None:
        """The last epoch that is active or over; None if there is none."""
        begun = [epoch for (one, epoch), _ in self.epochs if one == loader]
        closed = self.epochs.closed(loader)
        return max([*begun, *([closed] if closed >= 0 else [])], default=None)

    def done_places(self, loader: int, epoch: int) -> Ranges:
        """The places of an epoch that are done; none if it is not active."""
        ledger = self.epochs.get(loader, epoch)
        return Ranges() if ledger is None else ledger.done

    def held(self, worker: int) -> list[Mark]:
        return [
            (loader, epoch, begin, end)
            for (loader, epoch), ledger in self.epochs
            for begin, end in ledger.leased.get(worker, Ranges())
        ]

    def done(self, worker: int, marks: Iterable[Sequence[int]]) -> int:
        """`worker`'s updates from these places were applied to the global model; returns how many places are new."""
        count = 0
        for loader, epoch, begin, end in marks:
            ledger = self.epochs.get(loader, epoch)
            if ledger is None:
                self.repeated += end - begin
                continue
            newly_done = ledger.release(worker, begin, end)
            if newly_done < end - begin:  # its lease was freed meanwhile
                newly_done += ledger.free.remove(begin, end)
            self.repeated += end - begin - newly_done
            count += newly_done
            self._history.add(loader, epoch, begin, end, ledger)
            self.speeds.marked(loader, worker, newly_done)
            self.epochs.close_settled(loader)
        return count

    def give_back(self, worker: int, marks: Iterable[Sequence[int]]) -> None:
        """`worker` returns these places of its leases."""
        self.move(worker, None, marks)

    def move(self, worker: int, other: int | None, marks: Iterable[Sequence[int]]) -> None:
        """What `worker` holds of these places is leased to `other` from now on; free where that is None."""
        for loader, epoch, begin, end in marks:
            ledger = self.epochs.get(loader, epoch)
            if ledger is not None and worker in ledger.leased:
                for low, high in ledger.leased[worker].within(begin, end):
                    ledger.release(worker, low, high)
                    to = ledger.free if other is None else ledger.leased.setdefault(other, Ranges())
                    to.add(low, high)

    def leave_early(self, worker: int, loader: int, epoch: int, marks: Iterable[Sequence[int]]) -> None:
        """`worker`'s program ends its pass before the epoch is over."""
        self.give_back(worker, marks)
        ledger = self.epochs.get(loader, epoch)
        if ledger is not None:
            ledger.left = True
            self._history.add(loader, epoch, 0, 0, ledger)

    def ends(self, loader: int, epoch: int, total: int) -> None:
        """The loader turned out to have only `total` places in this epoch."""
        ledger = self.epochs.get(loader, epoch)
        if ledger is not None and total < ledger.total:
            ledger.shorten(total)
            self._history.add(loader, epoch, 0, 0, ledger)
            self.epochs.close_settled(loader)

    def lost(self, worker: int) -> None:
        """`worker` is lost: what it leased and did not mark is free again."""
        for ledger in self.epochs.ledgers():
            for begin, end in ledger.leased.pop(worker, Ranges()):
                ledger.free.add(begin, end)
            ledger.dry.discard(worker)
        self._waiting.discard(worker)
        self.speeds.lost(worker)
        self._at = {key: epoch for key, epoch in self._at.items() if key[1] != worker}

    def holds(self, worker: int, marks: Iterable[Sequence[int]]) -> None:
        """Set `worker`'s leases: live workers report theirs to a new keeper.

        An epoch that began after the keeper's replica was made is opened; the next request tells its length.
        """
        self.lost(worker)
        for loader, epoch, begin, end in marks:
            ledger = self.epochs.opened(loader, epoch, ENDLESS)
            if ledger is None:
                continue
            for low, high in ledger.free.within(begin, end):
                ledger.free.remove(low, high)
                ledger.leased.setdefault(worker, Ranges()).add(low, high)

    def pushed(self, marks: Iterable[Sequence[int]]) -> None:
        """Some shards hold updates from these places, also where they are not done."""
        self._pushed = {key: places for key, places in self._pushed.items() if not self.epochs.is_over(*key)}
        for loader, epoch, begin, end in marks:
            if not self.epochs.is_over(loader, epoch):
                self._pushed.setdefault((loader, epoch), Ranges()).add(begin, end)

    def is_pushed(self, mark: Mark) -> bool:
        """Whether some shards may hold updates from these leased places."""
        return mark[2] in self._pushed.get(mark[:2], Ranges())

    # -- replicas ---------------------------------------------------------------------------------

    def news(self, reader: int) -> Any:
        """The changes that `reader` lacks, as JSON values for its :meth:`learn`; None if there are none."""
        missing = self._history.missing(reader)
        if missing is None:
            return {"whole": self.state()} if self.epochs else None
        return missing or None

    def learn(self, news: Any) -> None:
        """Apply the keeper's `news`; leases are not followed."""
        if isinstance(news, dict):
            self.load(news["whole"])
            self.forget_leases()
            return
        for loader, epoch, begin, end, total, left in news:
            if epoch <= self.epochs.closed(loader) and self.epochs.get(loader, epoch) is None:
                continue
            ledger = self._open(Question(loader, epoch, total))
            assert ledger is not None
            ledger.left = ledger.left or bool(left)
            ledger.free.remove(begin, end)
            self.ends(loader, epoch, total)
            self.epochs.close_settled(loader)

    def catch_up(self, state: dict[str, Any]) -> None:
        """Load `state`, another replica of this ledger, unless this one is newer."""
        other = Ledger()
        other.load(state)
        if other.epochs.progress >= self.epochs.progress:
            self.load(state)

    def _open(self, question: Question) -> EpochLedger | None:
        """As `Epochs.opened`; a worker that asks knows the length of the epoch, and of those before it."""
        for (loader, epoch), begun in self.epochs:
            if loader == question.loader and epoch <= question.epoch and begun.total == ENDLESS:
                self.ends(loader, epoch, question.total)
        ledger = self.epochs.opened(question.loader, question.epoch, question.total)
        if ledger is not None and question.total != ledger.total and ENDLESS not in (question.total, ledger.total):
            raise MismatchError(
                f"workers do not share the same data: an epoch of loader {question.loader} has {ledger.total} samples "
                f"on one and {question.total} on another; give all workers the same data set and sampler"
            )
        return ledger

    def _lease(self, worker: int, loader: int, epoch: int, ledger: EpochLedger, question: Question, now: float) -> Mark:
        self.speeds.begin(loader, worker, now)
        units = self.speeds.fair_units(worker, question, -(-min(ledger.free.total, ledger.total) // question.unit), now)
        first = next(iter(ledger.free))[0]
        size = (first // question.unit + units) * question.unit - first
        end = self._pushed.get((loader, epoch), Ranges()).run_end(first)
        taken = ledger.free.take(size if end is None else min(size, end - first))
        assert taken is not None
        ledger.leased.setdefault(worker, Ranges()).add(*taken)
        ledger.dry.discard(worker)
        return loader, epoch, *taken

    # -- checkpoints and replicas -----------------------------------------------------------------

    def state(self, now: float = 0.0, workers: bool = True) -> dict[str, Any]:
        """State for a checkpoint or replica, as JSON values; without `workers`, none has leases or a speed."""
        places = [[loader, rank, epoch] for (loader, rank), epoch in self._at.items()]
        speeds = self.speeds.state() if workers else []
        return {**self.epochs.state(workers), "at": places, "speeds": speeds, "now": now}

    def load(self, state: dict[str, Any], now: float = 0.0) -> None:
        """Restore `state`; `now` may come from another clock."""
        self._history = History()  # each reader needs the whole ledger
        self.epochs.load(state)
        self._at = {(loader, rank): epoch for loader, rank, epoch in state["at"]}
        self.speeds.load(state["speeds"], now - state["now"])

    def forget_leases(self) -> None:
        """Free all that is not done: a new keeper starts so, before live workers report their leases."""
        for worker in sorted({rank for ledger in self.epochs.ledgers() for rank in ledger.leased}):
            self.lost(worker)
