# SPDX-License-Identifier: Apache-2.0
"""The ledger of an elastic run: leases, and the places in the global model, as of the last commit.

It wraps :mod:`paceline.data.ledger.ledger` with the control plane's rules: a worker can mark only places that it
holds, an epoch is over when all of it is committed, and a resumed run's remaining places are accepted once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from paceline.data.ledger.epoch_ledger import ENDLESS, Mark, Question, by_epoch
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.errors import MismatchError
from paceline.flow.control import validation

MOST_OPEN = 256
"""Epochs of all loaders for which one worker may ask at a time."""
NOTHING, WORK, OVER = range(3)
"""Answers to a question: nothing at present; a lease; the epoch is over for all workers."""
PREPARED = -1
"""Holds the places of commits that wait for other members, in place of the workers."""


class HeldLeases:
    """Unsettled leases: neither committed nor given back."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], Ranges] = {}

    def add(self, mark: Mark) -> None:
        """Add a lease."""
        loader, epoch, begin, end = mark
        self._held.setdefault((loader, epoch), Ranges()).add(begin, end)

    def settle(self, marks: Iterable[Sequence[int]]) -> None:
        """These are committed or given back."""
        for loader, epoch, begin, end in marks:
            held = self._held.get((loader, epoch))
            if held is not None:
                held.remove(begin, end)
                if not held:
                    del self._held[loader, epoch]

    def clear(self) -> None:
        """Drop all leases."""
        self._held.clear()

    def marks(self) -> list[Mark]:
        """All held leases."""
        return [(*key, begin, end) for key, held in self._held.items() for begin, end in held]


class ControlLedger:
    """Keeps the ledger.

    Attributes:
        saved: the ledger's state at the last commit.
        strange: places that workers marked without holding them; these marks are ignored.
    """

    def __init__(self) -> None:
        self.strange = 0
        self.reset()

    def reset(self) -> None:
        """Forget all epochs: all members begin from a checkpoint."""
        self._ledger = Ledger()
        self._expected: dict[tuple[int, int], list[list[int]]] = {}
        self._given_back: dict[tuple[int, int], Ranges] = {}
        self._asked: set[int] = set()  # loaders with leases so far
        self._opened: dict[int, set[tuple[int, int]]] = {}  # worker -> epochs for which it asked
        self._reported: dict[int, list[Mark]] = {}  # leases that a worker says it had before this server's restart
        self._prepared: dict[int, tuple[list[Mark], int]] = {}  # worker -> places of its commit, and strange ones
        self._trained: dict[int, Counter[int]] = {}  # the same worker -> loader -> how many places
        self.save()

    def ask(self, worker: int, question: Question, now: float) -> tuple[int, Mark | None]:
        """WORK with a lease, NOTHING or OVER; MismatchError if the workers' data differ."""
        self._count_open(worker, question)
        self._asked.add(question.loader)
        mark = self._ledger.ask(worker, question, now)
        if mark is not None:
            return WORK, mark
        return (OVER if self._ledger.settled(question.loader, question.epoch) else NOTHING), None

    def _count_open(self, worker: int, question: Question) -> None:
        """Refuse a worker that opens epochs without end, or that leaves epochs out: they would count as over."""
        loader, epoch = question.loader, question.epoch
        newest = self._ledger.newest(loader)
        if loader in self._asked and newest is not None and epoch > newest + 1:
            raise MismatchError(
                f"worker {worker} asks for epoch {epoch} of loader {loader}, and the newest one is {newest}"
            )
        opened = self._opened.setdefault(worker, set())
        if len(opened) >= MOST_OPEN:
            opened -= {key for key in opened if self._ledger.extent(*key) is None}
        opened.add((loader, epoch))
        if len(opened) > MOST_OPEN:
            raise MismatchError(f"worker {worker} asks for places of more than {MOST_OPEN} epochs at a time")

    def check(self, worker: int, marks: Sequence[Mark]) -> None:
        """Refuse a commit of places that the worker does not hold, or that it names twice.

        Places that are done, or beyond the end that another worker has reported, do no harm. Nor do those that the
        worker reported after a restart of this server, whose record may be older than a lease.

        Raises:
            MismatchError: it names places that are free, or that another worker holds.
        """
        named: dict[tuple[int, int], Ranges] = {}
        for loader, epoch, begin, end in marks:
            if named.setdefault((loader, epoch), Ranges()).add(begin, end) != end - begin:
                raise MismatchError(
                    f"worker {worker} names places {begin} to {end} of epoch {epoch} of loader {loader} twice in one "
                    "commit"
                )
        for loader, epoch, begin, end in self._reported.get(worker, []):
            named.setdefault((loader, epoch), Ranges()).remove(begin, end)
        leases = by_epoch(self._held(worker))
        for (loader, epoch), ranges in named.items():
            own = leases.get((loader, epoch), Ranges())
            if not ranges.without(own):
                continue  # all are its leases, and so none is done: the usual case
            for begin, end in self._not_done(loader, epoch, ranges):
                held = sum(high - low for low, high in own.within(begin, end))
                if held != end - begin:
                    raise MismatchError(
                        f"worker {worker} commits places {begin} to {end} of epoch {epoch} of loader {loader}, and "
                        f"holds {held} of these {end - begin}"
                    )

    def _not_done(self, loader: int, epoch: int, ranges: Ranges) -> list[tuple[int, int]]:
        """Those of these places that are not done, and of which the epoch has any."""
        extent = self._ledger.extent(loader, epoch)
        if extent is None and epoch <= self._ledger.epochs.closed(loader):
            return []
        total = ENDLESS if extent is None else extent[0]
        done = self._ledger.done_places(loader, epoch)
        kept = [(begin, min(end, total)) for begin, end in ranges if begin < total]
        return [left for begin, end in kept for left in Ranges([(begin, end)]).without(done)]

    def prepare(self, worker: int, marks: Sequence[Mark]) -> None:
        """A worker's commit of these places waits for the other members; `merge` or `abort` follows.

        They are cut from its leases now, so that a verdict does not cost time for the marks of every worker.
        """
        self.abort(worker)
        owned = self._owned(worker, marks)
        self._ledger.move(worker, PREPARED, owned)
        self._prepared[worker] = owned, _places(marks) - _places(owned)
        self._trained[worker] = Counter()
        for loader, _, begin, end in owned:
            self._trained[worker][loader] += end - begin

    def abort(self, worker: int) -> None:
        """The exchange of its commit is cancelled, if it has one: the worker holds the places again."""
        self._trained.pop(worker, None)
        owned, _ = self._prepared.pop(worker, ([], 0))
        self._ledger.move(PREPARED, worker, owned)

    def merge(self) -> None:
        """The exchange is committed: the places of all commits are in the global model."""
        self._ledger.done(PREPARED, self._ledger.held(PREPARED))
        self.strange += sum(strange for _, strange in self._prepared.values())
        for worker, trained in self._trained.items():
            for loader, places in trained.items():
                self._ledger.speeds.marked(loader, worker, places)
        self._prepared.clear()
        self._trained.clear()

    def done(self, worker: int, marks: Sequence[Mark]) -> None:
        """These places of its leases are in the global model."""
        owned = self._owned(worker, marks)
        self._ledger.done(worker, owned)
        self.strange += _places(marks) - _places(owned)

    def give_back(self, worker: int, marks: Sequence[Mark]) -> int:
        """The work on these places of its leases was rejected in the exchange: they go to another worker, once.

        Returns:
            Places that were given back before; they now count as done, since their samples may cause the bad results.
        """
        skipped = 0
        for mark in self._owned(worker, marks):
            loader, epoch, begin, end = mark
            before = self._given_back.setdefault((loader, epoch), Ranges())
            again = [(loader, epoch, low, high) for low, high in before.within(begin, end)]
            self._ledger.done(worker, again)
            skipped += sum(high - low for *_, low, high in again)
            self._ledger.give_back(worker, [mark])
            for low, high in Ranges([(begin, end)]).without(before):
                before.add(low, high)
        return skipped

    def settled(self, worker: int, marks: Sequence[Mark]) -> None:
        """The record has a commit of these, but the worker, which missed the verdict, reported that it holds them."""
        self._ledger.give_back(worker, self._owned(worker, marks))

    def lost(self, worker: int) -> None:
        """Free the leases of a lost worker, and the places of its commit."""
        self.abort(worker)
        self._ledger.lost(worker)
        self._opened.pop(worker, None)
        self._reported.pop(worker, None)

    def save(self) -> None:
        """A commit: save the ledger's present state."""
        self.saved = {**self._ledger.state(workers=False), "at": []}

    def unmerged(self, of: Callable[[int], bool]) -> bool:
        """Whether a worker holds places of whom `of` says so."""
        return any(of(worker) for epoch in self._ledger.epochs.ledgers() for worker in epoch.leased)

    def tell(self, worker: int, kind: str, values: Sequence[Any]) -> None:
        """Handle a worker's message about the data; MismatchError if it is invalid."""
        if kind == "done":
            self.done(worker, validation.marks(*validation.row(list(values), 1, kind)))
        elif kind == "left":
            loader, epoch, marks = validation.row(list(values), 3, kind)
            owned = self._owned(worker, validation.marks(marks))
            self._ledger.leave_early(worker, validation.number(loader), validation.stage(epoch), owned)
        elif kind == "ends":
            loader, epoch, total = validation.row(list(values), 3, kind)
            most = validation.whole(total, 0, ENDLESS, "places of an epoch")
            self._ends(worker, validation.number(loader), validation.stage(epoch), most)
        elif kind == "expect":
            loader, epoch, ranges = validation.row(list(values), 3, kind)
            self._expect(validation.number(loader), validation.stage(epoch), ranges)
        elif kind == "waits":
            self._ledger.waits(worker, bool(validation.row(list(values), 1, kind)[0]))
        else:
            raise MismatchError(f"workers tell left, ends, done, expect or waits, got {kind!r:.80}")

    def holds(self, worker: int, marks: Sequence[Mark]) -> None:
        """Leases that a worker reports after a server restart; done places and other workers' leases stay unchanged."""
        self._ledger.holds(worker, marks)
        accepted = self._held(worker)
        self._reported[worker] = [mark for mark in marks if mark not in accepted]

    def _held(self, worker: int) -> list[Mark]:
        """Its leases, and the places of its commit."""
        owned, _ = self._prepared.get(worker, ([], 0))
        return [*self._ledger.held(worker), *owned]

    def _owned(self, worker: int, marks: Sequence[Mark]) -> list[Mark]:
        held = by_epoch(self._ledger.held(worker))
        return [
            (*key, low, high)
            for key, ranges in by_epoch(marks).items()
            for begin, end in ranges
            for low, high in held.get(key, Ranges()).within(begin, end)
        ]

    def _ends(self, worker: int, loader: int, epoch: int, total: int) -> None:
        """A worker reports the end of an epoch: it must hold places of it, and done places must lie before the end."""
        extent, epochs = self._ledger.extent(loader, epoch), self._ledger.epochs
        if (extent is None and epoch <= epochs.closed(loader)) or (extent is not None and total >= extent[0]):
            return  # another worker has reported it
        if extent is not None and extent[0] != ENDLESS:
            raise MismatchError(
                f"worker {worker} says that epoch {epoch} of loader {loader} ends after {total} places, and all "
                f"workers said before that it has {extent[0]}; give all workers the same data"
            )
        holds = any((one, its) == (loader, epoch) for one, its, *_ in self._held(worker))
        if extent is None or not holds or total < extent[1]:
            raise MismatchError(
                f"worker {worker} says that epoch {epoch} of loader {loader} ends after {total} places, and it "
                f"{'holds none of them' if not holds else f'is done up to place {extent[1] if extent else 0}'}; give "
                "all workers the same data"
            )
        self._ledger.ends(loader, epoch, total)

    def _expect(self, loader: int, epoch: int, ranges: Any) -> None:
        """The first worker's report counts; all read one checkpoint, so a different report is an error."""
        rest = Ranges(validation.span(one) for one in validation.rows(ranges, "ranges"))
        known = self._expected.get((loader, epoch))
        if known is None and loader not in self._asked:
            self._expected[loader, epoch] = rest.state()
            self._ledger.epochs.expect(loader, epoch, rest)
            self.save()
        elif known != rest.state():
            raise MismatchError(
                f"workers do not resume from one checkpoint: of epoch {epoch} of loader {loader} one has the places "
                f"{'all' if known is None else known!r:.80} left to do and another {rest.state()!r:.80}; give all of "
                "them the same, before the first of them asks for work"
            )

    # -- the record -------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """For the record: without leases, which the members report to a restarted server."""
        return {
            "ledger": self._ledger.state(workers=False),
            "saved": self.saved,
            "expected": [[*key, rest] for key, rest in self._expected.items()],
            "asked": sorted(self._asked),
            "given_back": [[*key, places.state()] for key, places in self._given_back.items()],
        }

    def load(self, state: dict[str, Any], now: float) -> None:
        """Load a result of `state`; no worker holds leases until it reports them."""
        self._ledger.load(state["ledger"], now)
        self._ledger.forget_leases()
        self.saved = state["saved"]
        self._expected = {(loader, epoch): rest for loader, epoch, rest in state["expected"]}
        self._asked = set(state["asked"])
        self._given_back = {(one, epoch): Ranges(places) for one, epoch, places in state.get("given_back", [])}


def _places(marks: Sequence[Mark]) -> int:
    return sum(end - begin for *_, begin, end in marks)
