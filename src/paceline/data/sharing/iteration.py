# SPDX-License-Identifier: Apache-2.0
"""A pass over a worker's part of a loader, for each kind of loader.

With one worker, the user's loader itself is iterated. With several, a map-style `DataLoader` is rebuilt around a
:class:`~paceline.data.sampling.sampler.SamplingPlan`; its collate_fn, loader processes and pinning stay. Of any other
iterable of batches every worker iterates over the whole and takes its own batches.

If a pass that was split turns out to be an evaluation, each worker completes it with the other workers' samples, so
that it sees every sample once.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset

from paceline.core import rng
from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import ENDLESS, Leases, Mark, Question
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.batches import are_whole, piece_of_rest, place_in_rest, samples_in, sum_of
from paceline.data.sampling.buckets import BucketBatches
from paceline.data.sampling.position import UNIT, Position, set_states
from paceline.data.sampling.sampler import InShards, ListPlan, Plan, SamplingPlan, generators_of
from paceline.data.sampling.split import (
    Assignment,
    Cut,
    EvenAssignment,
    LeasedAssignment,
    Portion,
    Shares,
    Split,
    split_of,
)
from paceline.data.streams.dataset import ShardAssignment, ShardReading, ShardStream
from paceline.data.workers.batching import BatchRequest
from paceline.data.workers.loader import Loading
from paceline.errors import CheckpointError, PeerLostError, UnsupportedError


class RunData:
    """Counts the batches that the shared loaders of a run hand out.

    Args:
        seed: of the order of samples.
        began: called with (epoch, number of batches or None) at the start of every pass.
    """

    def __init__(self, world: World, seed: int, began: Callable[[int, int | None], None]) -> None:
        self.world, self.seed, self.began = world, seed, began
        self.leases: Leases | None = None  # under rules that lease samples
        self.counts: tuple[int, ...] = ()  # batches of each worker in turn; empty where shares are equal
        self.equal = False  # whether shares stay equal: the program asks for it, or calls all workers within passes
        self.places: PlaceLog | None = None  # which places each step trained on, if receipts are written
        self.warn: Callable[[str, str], None] = lambda key, text: None
        """Called with a warning, and a key that it has in common with later ones of its kind."""
        self._batches = 0  # handed out so far
        self.since = (0, 0, 0)  # samples, batches and nominal samples handed out since the last step
        self._wholes: dict[int, int] = {}  # data that each worker reads as a whole -> sum of its first batches
        self._in_hand: list[Mark] = []  # handed out, but not yet in a push
        self._coming: list[Mark] = []  # of the batch that is handed out now

    @property
    def idle(self) -> bool:
        """Whether no batch was handed out since the last step."""
        return not self.since[1]

    def refuse(self, text: str) -> NoReturn:
        """Raise `UnsupportedError` with this text, which then names the worker."""
        raise UnsupportedError(self.world.sign(text))

    def read_as_a_whole(self, number: int, checksum: int) -> None:
        """Each worker reads these data as a whole; its first batches of a pass have this checksum."""
        self._wholes[number] = checksum

    def handed_out(self, samples: int, nominal: int, marks: list[Mark]) -> None:
        """A batch goes to the program; `samples` is 0 if unknown."""
        if self.leases is not None:
            self._coming = marks
            self.leases.hand_out(marks)
            self._coming = []
        self.since = self.since[0] + samples, self.since[1] + 1, self.since[2] + nominal
        self._batches += 1
        self._in_hand += marks

    def untrained(self, since: tuple[int, int, int]) -> None:
        """Restore an earlier value of `since`: the batches after it are no part of the next step."""
        self.since = since
        if self.places is not None:
            self.places.untrained(since[1])

    def passed_over(self, marks: list[Mark]) -> None:
        """These leased places turned out to be empty."""
        self._in_hand += marks

    def take_marks(self) -> list[Mark]:
        """Take the leased places whose work is pushed now."""
        marks, self._in_hand = self._in_hand, []
        return marks

    @property
    def factor(self) -> float:
        """Samples since the last step, relative to full batches; 1 if unknown."""
        samples, batches, nominal = self.since
        return samples / nominal if batches and samples and nominal else 1.0


Row = list[Any]
"""[loader, epoch, places of the epoch or -1, [[begin, end], ..], part i, of n]: what one batch held."""


class PlaceLog:
    """The places of the batches that were handed out; its methods follow those of the loader registry.

    A batch whose places are not known is None, and so is a step without one: the program has data of its own.
    """

    def __init__(self) -> None:
        self._now: list[Row | None] = []
        self._steps: deque[tuple[int, list[Row | None]]] = deque()

    def handed_out(self, loader: int, cut: Cut | None, portion: Portion | None) -> None:
        """A batch of loader number `loader` goes to the program."""
        if portion is None:
            self._now.append(None)
            return
        total = -1 if cut is None or cut[1] >= ENDLESS else cut[1]
        part = portion.part or (0, 1)
        self._now.append([loader, portion.epoch, total, [list(one) for one in portion.places], *part])

    def untrained(self, batches: int) -> None:
        """Forget the batches after the first `batches` since the last step."""
        del self._now[batches:]

    def stepped(self, steps: int) -> None:
        """The optimizer made step number `steps`."""
        self._steps.append((steps, self._now or [None]))
        self._now = []

    def take(self, steps: int) -> tuple[list[Row], int]:
        """Take the places of all steps up to number `steps`, and how many of their batches have unknown ones."""
        batches: list[Row | None] = []
        while self._steps and self._steps[0][0] <= steps:
            batches += self._steps.popleft()[1]
        rows = [row for row in batches if row is not None]
        return _joined(rows), len(batches) - len(rows)

    def state(self) -> list[Any]:
        return [self._now, [[steps, rows] for steps, rows in self._steps]]

    def load(self, state: list[Any]) -> None:
        self._now = list(state[0])
        self._steps = deque((steps, rows) for steps, rows in state[1])


def _joined(rows: list[Row]) -> list[Row]:
    """The same places in fewer rows: those of one epoch together, neighbours as one range."""
    rows_by_key: dict[tuple[int, ...], Row] = {}
    for loader, epoch, total, ranges, part, parts in rows:
        row = rows_by_key.setdefault((loader, epoch, total, part, parts), [loader, epoch, total, [], part, parts])
        for begin, end in ranges:
            if parts == 1 and row[3] and row[3][-1][1] == begin:
                row[3][-1][1] = end
            else:
                row[3].append([begin, end])
    return list(rows_by_key.values())


# -- batches that hold the numbers of their samples ----------------------------------------------
#
# By them a program may fill a table of its own (targets, losses or weights of samples). Each worker trains on its part
# of an epoch, so such a table lacks the rest.

ENOUGH = 8
"""So many numbers in a row are no coincidence."""
NUMBERS = (
    "the batches hold the numbers of their samples: where the program fills a table by them (targets, losses or "
    "weights of samples), each worker fills in its own part only, and rank 0 saves no more than that; with the two "
    "lines in the program, run.messages.all_reduce adds such tables up"
)


class SampleNumbers:
    """Compares the first batches of a loader with the samples of its data set that were asked for."""

    def __init__(self, data: Any) -> None:
        self._data = data
        self._places: set[Any] | None = None  # keys of a batch's entries that have held the numbers so far
        self._equal = 0
        self._open = True

    def are_handed_out(self, batch: Any, asked: Callable[[], Sequence[Any]]) -> bool:
        """Whether this next batch, for which sample numbers were `asked`, shows that one entry of every batch is the
        numbers of its samples; true once at most."""
        if not self._open:
            return False
        entries = _entries(batch)
        numbered = len(entries) > 1 and any(value is not None for value in entries.values())
        names = _names(self._data, asked()) if numbered else []
        keys = {key for key, value in entries.items() if value in names}
        self._places = keys if self._places is None else self._places & keys
        self._equal += len(names[0]) if names else 0
        self._open = bool(self._places) and self._equal < ENOUGH
        return bool(self._places) and self._equal >= ENOUGH


def _entries(batch: Any) -> dict[Any, list[int] | None]:
    """The entries of a batch; whole numbers, one a sample, as a list, and None for others."""
    rows = batch if isinstance(batch, dict) else dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else {}
    whole = {
        key: value.tolist()
        for key, value in rows.items()
        if isinstance(value, Tensor) and value.dim() == 1 and not (value.is_floating_point() or value.is_complex())
    }
    return {key: whole.get(key) for key in rows}


def _names(data: Any, numbers: Sequence[Any]) -> list[list[Any]]:
    """The numbers of some samples, in the data set and in each one of which it is a subset."""
    names = [list(numbers)]
    while isinstance(data, Subset):
        names.append([int(data.indices[number]) for number in names[-1]])
        data = data.dataset
    return names


# -- hints ---------------------------------------------------------------------------------------
#
# Tells a data set which samples come next, so that it can fetch them in the background.
#
# A data set may have any of these attributes; those of `paceline.data` do::
#
#     prefetch(ids)       fetch in the background what these samples need, in this order; replaces earlier hints
#     shard_sizes         samples of each shard: neighbours in the data set lie in one file
#     shuffle_buffer      shards whose samples are mixed with each other

BATCHES = 16
"""Prefetch distance for a data set without shards, in batches."""


class Prefetch:
    """Sends prefetch hints as batches are begun."""

    def __init__(self, plan: SamplingPlan, assignment: Assignment, epoch: int) -> None:
        self._plan, self._assignment = plan, assignment
        order = plan.order(epoch)
        self._batches = max(BATCHES, 2 * order.window // plan.unit) if isinstance(order, InShards) else BATCHES
        self._left = 0
        self._told: dict[int, Ranges] = {}

    def begun(self, portion: Portion) -> None:
        """A batch was begun; every quarter of the distance, send the next hints."""
        if self._left == 0 or portion.places[0][0] not in self._told.get(portion.epoch, ()):
            self._left = self._batches // 4
            self._tell([portion, *self._assignment.coming(self._batches)])
        self._left -= 1

    def _tell(self, portions: Sequence[Portion]) -> None:
        ids: list[Any] = []
        self._told = {}
        for portion in portions:
            hinted = self._told.setdefault(portion.epoch, Ranges())
            for place in portion.places:
                hinted.add(*place)
            order = self._plan.order(portion.epoch)
            if isinstance(order, InShards):
                ids += order.first_samples(portion.places)
            else:
                ids += self._plan.ids(portion, lambda: portions)
        self._plan.loader.dataset.prefetch(list(dict.fromkeys(ids)))  # type: ignore[attr-defined]


_END = object()


class Iteration:
    """Makes a worker's batches; takes the arguments of `SharedLoader`."""

    def __init__(
        self, loader: Iterable[Any], number: int, position: Position, registry: RunData, leases: Leases | None
    ) -> None:
        self.loader, self._number, self._position, self._registry = loader, number, position, registry
        self._leases = leases
        self.length: int | None = None  # batches of this worker in the present pass, if known
        self.reached = (0, 0)  # epoch, the furthest place of it that this worker was given
        self.assignment: EvenAssignment | None = None  # of the present pass, if it can be dealt anew
        self.plan: SamplingPlan | None = None  # of a map-style loader
        self._loading: Loading | None = None
        self._numbers = SampleNumbers(getattr(loader, "dataset", None))
        self.listed = ListPlan(loader) if isinstance(loader, Sequence) else None
        self.shards: ShardReading | None = None
        if isinstance(loader, DataLoader) and isinstance(loader.dataset, ShardStream):
            self.shards = ShardReading(loader, registry.seed)
        alone = registry.world.size == 1
        if isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset):
            workers = 1 if leases is not None else registry.world.size
            batched = loader.batch_sampler is not None or not alone  # one worker may have a loader without batches
            self.plan = SamplingPlan(loader, registry.seed, position, workers) if batched else None
        if alone:
            position.track(generators_of(loader))

    @property
    def _world(self) -> World:
        return self._registry.world  # changes as workers join and leave

    @property
    def as_it_is(self) -> bool:
        """Whether the user's own loader is iterated."""
        alone = self._world.size == 1 and not self._position.others
        return alone and not (self.plan is not None and self.plan.foreseen)

    @property
    def chosen(self) -> Plan | None:
        """The plan that is followed; None if the loader is iterated as a whole."""
        return self.listed or (None if self.as_it_is else self.plan)

    def batches(self, skip: int, length: Callable[[], int | None]) -> Generator[Any, None, None]:
        """The batches of a pass, without the first `skip`; `length` gives those of all of it."""
        plan = self.chosen if self.shards is None else None
        if plan is not None:
            assignment = self._assignment(plan, skip, length)
            return self._planned(plan, assignment) if isinstance(plan, SamplingPlan) else self._from_list(assignment)
        self.length = length()
        if self.shards is not None:
            return self._read(self.shards)
        if self.as_it_is:
            return self._users_own(skip)
        return self._rounds(skip) if self._leases is None else self._leased_batches(self._leases)

    def _begin(self, cut: Cut | None) -> None:
        self._position.split(cut)
        self._registry.began(self._position.epoch, self.length)

    # -- one worker -------------------------------------------------------------------------------

    def _users_own(self, skip: int) -> Generator[Any, None, None]:
        """The user's loader itself. After a resume, replay the epoch from its start up to the position."""
        position = self._position
        self._begin(self._own_cut())
        now, generators = rng.capture(), position.generators
        start = position.epoch_start if skip > 0 else None
        if start is not None:
            rng.restore(start)
            set_states(generators, start["loader"])
        else:
            position.starts_epoch({**now, "loader": [g.get_state() for g in generators]})
        batches = iter(self.loader)
        for _ in range(skip):
            next(batches, None)
        if start is not None:
            rng.restore(now)
        nominal = getattr(self.loader, "batch_size", None) or 0
        for batch in batches:
            yield self._hand_out(batch, samples_in(batch), nominal)

    def _own_cut(self) -> Cut:
        if self.plan is None:
            return "alone", ENDLESS, 1, 1
        sampler: Any = self.plan.sampler
        places = len(sampler) if hasattr(sampler, "__len__") else ENDLESS
        unit = self.plan.unit
        return "alone", places // unit * unit if self.plan.drops_last else places, unit, 1

    # -- a map-style loader -----------------------------------------------------------------------

    def _assignment(self, plan: Plan, skip: int, length: Callable[[], int | None]) -> Assignment:
        position, world = self._position, self._world
        if position.now.cut is not None or position.epoch in position.rest:
            self._check_same_data(plan.places(position.epoch))
        if self._leases is not None:
            places = plan.places(position.epoch)
            self.length = length()
            self._begin(("leased", places, plan.unit, world.size))
            question = Question(self._number, position.epoch, places, plan.unit, plan.most)
            return LeasedAssignment(self._leases, question, position.held)
        assignment, places = plan.even(position, world, skip, self._registry.counts)
        fits = position.now.cut is not None and position.now.cut[0].startswith(("rounds", "shares"))
        self.assignment = assignment if fits and type(assignment) is EvenAssignment and plan.tail != "pieces" else None
        self._check_whole(places)
        self.length = length()
        self._registry.began(position.epoch, self.length)
        return assignment

    @property
    def furthest(self) -> list[int] | None:
        """[loader, epoch, end of the last place that this worker was given, batches up to there]; None if its pass
        cannot be dealt anew."""
        one = self.assignment
        return None if one is None else [self._number, self._position.epoch, one.furthest, one.given]

    def deal(self, counts: Sequence[int], place: int) -> None:
        """From the first turn after `place` on, worker r takes counts[r] batches in turn."""
        split = split_of(self._shares)
        if isinstance(split, Shares) and (turn := split.next_turn(place)) is not None:
            self._cut_anew(f"{turn}:{','.join(map(str, counts))}")

    def even_out(self, had: Sequence[int], lacks: Sequence[int]) -> tuple[int, ...]:
        """After the batches that workers `had`, each takes those that it lacks, and then all equally many.
        Returns how many each has left."""
        split = self._cut_anew(f"had:{','.join(map(str, had))} lacks:{','.join(map(str, lacks))}")
        return tuple(split.batches(rank) - one for rank, one in enumerate(had))

    @property
    def _shares(self) -> Cut:
        """The cut of the present pass, as shares."""
        cut = self._position.now.cut
        assert cut is not None
        return (f"shares 0:{','.join('1' * cut[3])}", *cut[1:]) if cut[0] == "rounds" else cut

    def _cut_anew(self, more: str) -> Split:
        shares = self._shares
        cut = f"{shares[0]} {more}", *shares[1:]
        split = split_of(cut)
        assert self.assignment is not None
        self._position.split(cut)
        self.assignment.deal(split)
        return split

    def _check_whole(self, places: int) -> None:
        """Report which batches of an epoch are cut or dropped; refuse to drop all."""
        plan, world, cut = self.plan, self._world, self._position.now.cut
        if plan is None or cut is None or places >= ENDLESS:
            return
        if places % world.size and plan.tail == "pieces" and not isinstance(plan.sampler, BucketBatches):
            self._registry.warn(
                f"cut {self._number}",
                f"{type(plan.sampler).__name__}: the last {places % world.size} batches of a pass are cut into smaller "
                f"ones, so that each of {world.size} workers makes equally many steps; where batches must stay as they "
                "are, give the batch sampler an attribute drop_last = True",
            )
        self._check_dropped((places - cut[1]) // plan.unit, cut[1] > 0)

    def _check_dropped(self, batches: int, others: bool) -> None:
        """Report the whole batches that one worker would take and several do not; refuse if there are no `others`."""
        if batches and not others and not self._position.others:
            self._registry.refuse(
                f"drop_last asks for whole batches, and the loader has {batches} for {self._world.size} workers, "
                "so that some would have none; take a smaller batch_size, fewer workers, or drop_last=False"
            )
        if batches:
            many = "1 whole batch" if batches == 1 else f"{batches} whole batches"
            self._registry.warn(
                f"drop_last {self._number}",
                f"drop_last: each pass leaves out {many} that one worker would take, so that each of "
                f"{self._world.size} workers makes equally many steps, all of whole batches",
            )

    def _check_same_data(self, places: int, unit: int = 1) -> None:
        """Refuse to resume an epoch on data of another length."""
        cut, rest = self._position.now.cut, self._position.rest.get(self._position.epoch)
        if rest is not None and ENDLESS - 1 in rest:  # the length was unknown to the ledger
            rest.remove(places, ENDLESS)
        then = max((end for _, end in rest), default=0) if rest is not None else cut[1] if cut is not None else places
        whole = self.plan.cut(places, self._world.size)[1] if self.plan is not None else places
        if then > places or (rest is None and then not in (places, whole)):
            raise CheckpointError(
                self._world.sign(
                    f"the checkpoint was made in an epoch of {then // unit} {'samples' if unit == 1 else 'shards'} or "
                    f"more, and the loader has {places // unit}; "
                    "resume with the data set of then, or call set_epoch with the next epoch to begin that"
                )
            )

    def _planned(self, plan: SamplingPlan, assignment: Assignment) -> Generator[Any, None, None]:
        """Batches of a map-style loader; an idle worker waits for leases that lost workers may free."""
        nominal = plan.nominal(self._position.epoch) if plan.whole else plan.unit
        under_way: deque[tuple[Portion, int]] = deque()
        fetches = hasattr(plan.loader.dataset, "prefetch")
        prefetch = Prefetch(plan, assignment, self._position.epoch) if fetches else None
        numbers = self._numbers if self._world.size > 1 else None
        if self._leases is not None:
            self._position.begun = lambda: [mark for portion, _ in under_way for mark in self._marks(portion)]

        def requests(first: Portion) -> Iterator[BatchRequest]:
            portion: Portion | None = first
            while portion is not None:
                ids = plan.ids(portion, assignment.known)
                if len(ids):
                    under_way.append((portion, len(ids)))
                    if prefetch is not None:
                        prefetch.begun(portion)  # may request a lease, which reports what this worker holds
                    yield BatchRequest(portion.epoch, ids)
                elif isinstance(assignment, LeasedAssignment) and (end := plan.end(portion.epoch)) is not None:
                    assignment.ends(portion.epoch, end)
                portion = assignment.next(wait=False)

        with self._until_left(assignment):
            while (portion := assignment.next(wait=True)) is not None:
                if self._loading is None:
                    self._loading = Loading(plan.loader, self._registry.seed)
                for batch in self._loading.batches(requests(portion)):
                    portion, samples = under_way.popleft()
                    if numbers is not None and numbers.are_handed_out(batch, partial(plan.ids, portion)):
                        self._registry.warn("numbers", NUMBERS)
                    yield self._hand_out(batch, samples, nominal, portion)

    def rest_of(self, epoch: int, batches: int) -> Iterator[Any]:
        """The other workers' batches of a pass of which this one has seen its first `batches`."""
        plan = self.plan
        assert plan is not None
        loading = self._loading or Loading(plan.loader, self._registry.seed)
        portions = plan.rest_of(epoch, self._world, batches)
        return loading.batches(BatchRequest(epoch, ids) for one in portions if len(ids := plan.ids(one)))

    @contextlib.contextmanager
    def _until_left(self, assignment: Assignment) -> Iterator[None]:
        """At the end of a pass drop its leases; return them if the program left it early."""
        complete, position = False, self._position
        try:
            yield
            complete = True
        finally:
            if isinstance(assignment, LeasedAssignment):
                if not complete and self._leases is not None:
                    held = [*position.begun(), *assignment.held]
                    with contextlib.suppress(PeerLostError):  # a worker that was given up has no leases to return
                        self._leases.leave_early(self._number, position.epoch, held)
                assignment.held.clear()
                position.begun = list

    def _marks(self, portion: Portion | None) -> list[Mark]:
        """The marks of a batch; none if it was not leased."""
        if portion is None or self._leases is None:
            return []
        return [(self._number, portion.epoch, begin, end) for begin, end in portion.places]

    # -- shards -----------------------------------------------------------------------------------

    def _shard_assignment(self, places: int) -> Assignment:
        position, world = self._position, self._world
        self._check_same_data(places, UNIT)
        if self._leases is not None:
            self._begin(None)
            question = Question(self._number, position.epoch, places, UNIT, 1)
            return LeasedAssignment(self._leases, question, position.held)
        if places < world.size * UNIT and not position.others:
            self._registry.refuse(
                f"the stream has {places // UNIT} shards for {world.size} workers, so some would have nothing to "
                "do; make more shards, or share an iterable that every worker reads as a whole"
            )
        self._begin(("shards", places, 1, world.size))
        rest = position.rest.get(position.epoch, Ranges([(0, places)]))
        return ShardAssignment(position.epoch, rest, world.size, world.rank, position.now.in_shards())

    def _read(self, shards: ShardReading) -> Generator[Any, None, None]:
        """Batches of shards; an empty place is marked done with the next batch."""
        position, leased = self._position, self._leases is not None
        assignment = self._shard_assignment(shards.places)
        if leased:
            position.begun = lambda: [mark for portion in shards.begun() for mark in self._marks(portion)]
        nominal = getattr(self.loader, "batch_size", None) or 0
        with self._until_left(assignment):
            for shard_batch in shards.batches(assignment):
                if not leased:
                    number = position.now.batches + bool(shard_batch.samples)
                    position.now.in_shards().add(number, shard_batch.portion.places)
                elif not shard_batch.samples:
                    self._registry.passed_over(self._marks(shard_batch.portion))
                if shard_batch.samples:
                    nominal = nominal or shard_batch.samples
                    yield self._hand_out(shard_batch.batch, shard_batch.samples, nominal, shard_batch.portion)

    def _from_list(self, assignment: Assignment) -> Generator[Any, None, None]:
        """Items of a list."""
        assert self.listed is not None
        listed, nominal = self.listed, 0
        with self._until_left(assignment):
            while (portion := assignment.next(wait=True)) is not None:
                item = listed.at(portion)
                if item is not None:
                    samples = listed.samples(item)
                    nominal = nominal or samples
                    yield self._hand_out(item, samples, nominal, portion)

    # -- any other iterable -----------------------------------------------------------------------

    def _rounds(self, skip: int) -> Generator[Any, None, None]:
        """Rounds of N batches, one for each worker; the batches of a last, incomplete one are cut, or dropped."""
        size, rank = self._world.size, self._world.rank
        self._begin(("rounds", ENDLESS, 1, size))
        drops = are_whole(self.loader)
        rest = self._position.rest.get(self._position.epoch)
        round_: list[Any] = []
        places: list[int] = []  # of the batches in `round_`
        done, nominal = 0, 0
        for place, batch in enumerate(self.loader):
            if rest is not None and place not in rest:
                continue
            round_.append(batch)
            places.append(place)
            if len(round_) == size:
                if not done:
                    self._registry.read_as_a_whole(self._number, sum_of(round_))
                mine, at, round_, places = round_[rank], places[rank], [], []
                done += 1
                nominal = nominal or samples_in(mine)
                if done > skip:
                    yield self._hand_out(mine, samples_in(mine), nominal, Portion(self._position.epoch, [(at, at + 1)]))
        if drops:
            self._check_dropped(len(round_), done > 0)
            return
        mine = piece_of_rest(round_, size, rank) if round_ else None
        if mine is not None and done >= skip:
            number, part = place_in_rest(len(round_), size, rank)
            place = places[number]
            portion = Portion(self._position.epoch, [(place, place + 1)], part if part[1] > 1 else None)
            yield self._hand_out(mine, samples_in(mine), nominal or samples_in(mine), portion)

    def _leased_batches(self, leases: Leases) -> Generator[Any, None, None]:
        """Leased batches of an iterable, which is iterated from its start if an earlier place is leased again."""
        self._begin(None)
        question = Question(self._number, self._position.epoch, ENDLESS, most=4)
        assignment = LeasedAssignment(leases, question, self._position.held)
        stream, at, nominal = iter(self.loader), 0, 0
        with self._until_left(assignment):
            while (portion := assignment.next(wait=True)) is not None:
                ((place, _),) = portion.places
                if place < at:
                    stream, at = self._again(stream), 0
                batch: Any = None
                while at <= place and batch is not _END:
                    batch, at = next(stream, _END), at + 1
                if batch is _END:
                    at -= 1
                    assignment.ends(portion.epoch, at)
                    continue
                nominal = nominal or samples_in(batch)
                yield self._hand_out(batch, samples_in(batch), nominal, portion)

    def _again(self, stream: Iterator[Any]) -> Iterator[Any]:
        again = iter(self.loader)
        if again is stream:
            self._registry.refuse(
                f"{type(self.loader).__name__} can be iterated only once, and a lost worker's batches must be "
                "made again; share a list, a DataLoader, or an object whose iter() starts again"
            )
        return again

    def _hand_out(self, batch: Any, samples: int, nominal: int, portion: Portion | None = None) -> Any:
        self._position.now.batches += 1
        if portion is not None and portion.epoch == self._position.epoch:
            before = self.reached[1] if self.reached[0] == portion.epoch else 0
            self.reached = portion.epoch, max(before, portion.places[-1][1])
        self._registry.handed_out(samples, nominal, self._marks(portion))
        if self._registry.places is not None:
            self._registry.places.handed_out(self._number, self._position.now.cut, portion)
        return batch
