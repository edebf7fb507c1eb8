# SPDX-License-Identifier: Apache-2.0
"""A run's data: the loaders that it shares, their positions, and the number of samples in the present step.

`run.share(loader)` gives each worker its part of the user's loader.

If all workers make the same number of steps, the part is a function of (seed, epoch, N), without communication
(:mod:`paceline.data.sampling.split`); asynchronous workers lease it (:mod:`paceline.data.ledger.ledger`). After a
resume, iteration continues after the last batch. :mod:`.iteration` makes the batches.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from weakref import WeakValueDictionary

from torch import nn
from torch.utils.data import DataLoader

from paceline.communication import virtual
from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import ENDLESS, Leases, Mark
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.batches import are_whole, has_piece
from paceline.data.sampling.position import Position
from paceline.data.sampling.sampler import SamplingPlan
from paceline.data.sharing.iteration import Iteration, RunData
from paceline.data.sharing.place import CALLED_WITHIN, ENDED, INSIDE, LEFT, Place, pack

Load = Callable[[Position], None]
RECENT = 8
"""Shared loaders that are kept although the program may have dropped them."""


@dataclass
class ActivePass:
    """A pass that is under way."""

    length: int | None  # batches of this worker in it, if known
    fewest: Callable[[], int]  # gives those of the worker that has the fewest
    batches_then: int  # batches of all passes that were handed out when it began
    steps_then: int  # steps of the optimizer likewise
    reader: int = 0  # the thread that asked for its last batch; 0 before


OURS = 3
"""Reference count of data that only `NumberedData` holds: its own, and two of the function that counts."""


class NumberedData:
    """The shared data, numbered in the order of `run.share`, alike on every worker.

    A program may make its batches again for each epoch, so data that it drops are dropped here too; only positions
    stay. Data are referred to weakly if their type allows; others (lists) are kept until the reference count shows that
    the program dropped them. Noticing that late changes no number, since dropped data cannot be shared again.
    """

    def __init__(self) -> None:
        self.positions: list[Position] = []  # this worker's, by number
        self.live: list[int] = []  # data that the program may still iterate over, or whose work has not all entered
        self._numbers: dict[int, int] = {}  # id of data -> number
        self._data: dict[int, Callable[[], Any]] = {}  # number -> returns the data, or None
        self._held: dict[int, Any] = {}  # number -> data without weak references

    def number(self, data: Any) -> int | None:
        """The number of data; None if they are new."""
        number = self._numbers.get(id(data))
        return number if number is not None and self._data[number]() is data else None

    def add(self, data: Any) -> int:
        """Number new data."""
        self._let_go()
        number = len(self.positions)
        try:
            self._data[number] = weakref.ref(data)
        except TypeError:
            self._held[number] = data
            self._data[number] = lambda: self._held.get(number)
        self._numbers[id(data)] = number
        self.positions.append(Position())
        self.live.append(number)
        return number

    def _let_go(self) -> None:
        """Forget data that the program has dropped, and positions that can no longer change."""
        for number in [one for one in self._held if _is_dropped(self._held, one)]:
            del self._held[number]
        gone = {number for number, data in self._data.items() if data() is None}
        if gone:
            self._numbers = {key: number for key, number in self._numbers.items() if number not in gone}
            self._data = {number: data for number, data in self._data.items() if number not in gone}
        self.live = [one for one in self.live if one in self._data or not self.positions[one].settled]
        for number in gone.difference(self.live):
            self.positions[number].strip()


def _is_dropped(held: dict[int, Any], number: int) -> bool:
    data = held[number]
    return sys.getrefcount(data) <= OURS


class LoaderRegistry(RunData):
    """Shares loaders among the workers and counts the batches that they hand out.

    `waited` is called with the seconds that the program waited for a batch.
    """

    def __init__(
        self,
        world: World,
        seed: int,
        began: Callable[[int, int | None], None],
        waited: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.waited, self._data = waited, NumberedData()
        super().__init__(world, seed, began)
        self._shares: WeakValueDictionary[int, SharedLoader] = WeakValueDictionary()  # by the ids of their loaders
        self._recent: deque[SharedLoader] = deque(maxlen=RECENT)
        self._loaded: Sequence[Load] = []
        self._epoch = 0  # of the first loader, from a checkpoint
        self.samples = 0
        self.ready: Callable[[], None] = lambda: None  # called before the first batch of every pass
        # called where an iteration of the program's loop is over; its result is called if another one follows
        self.safe: Callable[[], Callable[[], None] | None] = lambda: None
        self.may_leave: Callable[[], None] = lambda: None  # called there, too: a worker that is to leave stays in it
        self.empty: Callable[[], None] = lambda: None  # called after a pass in which this worker got no batch
        # called after the first step in the data of a leader, with the steps that a pass over them has
        self.led: Callable[[int], None] = lambda steps: None
        self.trains: Callable[[], bool] = lambda: False  # whether the program trains now, rather than evaluates
        # called once a pass is over in which the program trained, before anything else is done
        self.pass_over: Callable[[], None] = lambda: None
        self._turn: Callable[[], None] | None = None  # called before the first batch of a step is handed out
        self._calls_in_steps = False  # whether the program has called all workers between a batch and its step
        self.passed: Callable[[], None] = lambda: None  # called after a pass in which the optimizer stepped
        self._under_way: dict[Position, ActivePass] = {}  # the outermost first
        self._leader: Position | None = None  # position of the pass in which the optimizer steps
        self._earlier = 0  # passes over the data of leaders before it
        self.made = 0  # steps
        self.dealt = False  # whether shares have been unequal
        self.equal_steps = 0.0  # those that it would have made with equal shares
        self._last_place = 0  # of the last pass that is over, packed
        self._last_pass: ActivePass | None = None
        self._trainer: int | None = None  # the thread of the optimizer's steps
        self._unmet = False  # whether `pass_over` is to be called
        self._steps: deque[tuple[int, list[list[int]]]] = deque()  # step -> [epoch, batches] of each loader
        self._rows: list[list[int]] = []  # the last of them
        self._closed = False

    def begin(
        self,
        leases: Leases | None,
        safe: Callable[[], Callable[[], None] | None] | None,
        passed: Callable[[], None],
        warn: Callable[[str, str], None],
        empty: Callable[[], None],
        led: Callable[[int], None],
    ) -> None:
        """The run is built; `warn` takes warnings, and the others are called as the attributes say."""
        self.leases, self.safe, self.passed = leases, safe or self.safe, passed
        self.warn, self.empty, self.led = warn, empty, led

    def move_to(self, world: World) -> None:
        """This worker has another rank, or the cluster another size."""
        self.world = world

    def among_members(self, ready: Callable[[], None], may_leave: Callable[[], None]) -> None:
        """What an elastic run calls before the first batch of a pass, and where an iteration is over."""
        self.ready, self.may_leave = ready, may_leave

    def meet(self, trains: Callable[[], bool], pass_over: Callable[[], None]) -> None:
        """Workers meet after passes in which the program `trains`."""
        self.trains, self.pass_over = trains, pass_over

    def wait_by(self, turn: Callable[[], None] | None) -> None:
        """`turn` waits for this worker's turn to make a step; None if all make it together."""
        self._turn = turn

    def share(self, loader: Iterable[Any], even: bool = False) -> SharedLoader:
        """This worker's part of the user's `loader`; the same object for the same loader, the same position for the
        same data. `even`: whether workers get the same number of batches under every rule."""
        if isinstance(loader, nn.Module) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
            self.refuse(
                "run.share takes a DataLoader, or an iterable of batches that every worker sees in the same order, "
                f"got a {type(loader).__name__}"
            )
        known = self._shares.get(id(loader))
        if known is not None:
            return known
        data = getattr(loader, "dataset", loader)  # a program may build a loader for each epoch
        number = self._data.number(data)
        again = number is not None
        if number is None:
            self._recent = deque((one for one in self._recent if one.again), RECENT)
            number = self._data.add(data)
            if len(self._loaded) > number:
                self._loaded[number](self._data.positions[number])
        self.equal |= even
        share = SharedLoader(loader, number, self._data.positions[number], self, None if even else self.leases, again)
        self._shares[id(loader)] = share
        self._recent.append(share)
        return share

    # -- where an iteration of the program's loop is over -----------------------------------------

    def begins(self, position: Position, length: int | None, fewest: Callable[[], int]) -> ActivePass:
        """A pass over the data of `position` begins, of `length` batches if that is known; returns it for `ends`."""
        one = self._under_way[position] = ActivePass(length, cache(fewest), self._batches, self.made)
        return one

    def ends(self, position: Position, one: ActivePass, complete: bool) -> None:
        """The pass is over (`complete`), or the program has left it."""
        if self._closed or self._under_way.get(position) is not one:
            return  # the run is over, and this may be the interpreter's end; or a later pass over the data is active
        led = self._training is position and not position.leased
        del self._under_way[position]
        if self.equal and not self._under_way:
            self.counts = ()
        batches = position.now.batches
        if one.batches_then == self._batches and not (batches or position.leased):
            self.empty()
        if led and (self.made > one.steps_then or (complete and self.trains())):
            whole = complete or (one.length is not None and batches >= one.length)
            self._last_place, self._last_pass = pack(self._number(position), batches, ENDED if whole else LEFT), one
            self._unmet = True
        if position is self._leader:
            self.passed()

    def close(self) -> None:
        """The run is over: what is left of its passes does nothing, whenever the garbage collector ends them."""
        self._closed = True
        self._under_way.clear()

    def leave(self, position: Position | None = None) -> None:
        """The program has left its passes (over the data of `position`), of which it may still hold iterators."""
        for active, one in list(self._under_way.items()):
            if position in (None, active):
                self.ends(active, one, complete=False)

    def settle(self) -> None:
        """The program goes on after a pass in which it trained, and which it may have left early: call `pass_over`."""
        if self._unmet and not self._closed and self.world.size > 1 and self._trains_here():
            self._unmet = False
            self.pass_over()
            self.passed()

    def called(self) -> None:
        """The program is about to call all workers."""
        self._calls_in_steps |= self.leads and not self.idle
        if self._leader in self._under_way and self.world.size > 1:
            stand, self.equal = bool(self.counts), True
            if stand:
                if (take := self.safe()) is not None:
                    take()  # others do before their next batch
                self.pass_over()  # which they call as soon as they come to this call
        self.settle()

    @property
    def can_wait(self) -> bool:
        """Whether workers can take turns: the program asks for each batch, and calls not all workers in a step."""
        return (self.leads or not self.idle) and not self._calls_in_steps

    @property
    def _training(self) -> Position | None:
        """Position of the active pass in which the optimizer steps, or will; not of a loader that is read beside it."""
        if self._leader in self._under_way:
            return self._leader
        fresh = (position for position, one in self._under_way.items() if one.steps_then == self.made)
        return next(fresh if self._leader is not None else iter(self._under_way), None)

    def _number(self, position: Position) -> int:
        """Number of the present pass over the data of `position` among all in which the optimizer stepped."""
        return self._before(position) + position.epoch

    def _before(self, position: Position) -> int:
        """Passes over the data of earlier leaders, if `position` leads now."""
        leader = self._leader
        return self._earlier if leader in (None, position) else self._earlier + leader.epoch + (not leader.fresh)

    def place(self, leaving: bool) -> int:
        """Where this worker is in the data that it trains on, packed (:mod:`.place`).

        If its program is over (`leaving`), with its steps in place of the batches.
        """
        if leaving and self._last_place and not self._under_way:
            last = Place.unpack(self._last_place)
            return pack(last.number, self.made, last.state)
        position = self._training
        if position is None:
            return self._last_place
        share = self.leading if self.counts else None
        over = share is not None and position.now.batches >= share.batches_of_worker()
        # of unequal shares a worker tells with its last batch that it does not ask for another, as at a checkpoint
        return 0 if position.leased else pack(self._number(position), position.now.batches, ENDED if over else INSIDE)

    def asked(self, position: Position) -> Callable[[], None] | None:
        """The program asks for the next batch; the caller calls the result if there is one.

        An iteration is over where the outermost loop asks, if the first step was made in that loop: inner loops run in
        the middle of an iteration, and a loop without steps (a validation) belongs to the iteration before it.
        """
        if (one := self._under_way.get(position)) is not None:
            one.reader = threading.get_ident()
        if next(iter(self._under_way), None) is not position:
            return None
        if position is not self._leader or self.idle:  # else in the middle of accumulating gradients
            self.may_leave()
        take = self.safe() if position is self._leader else None
        if (turn := self._turn) is None or not self.idle or self._closed or self._leader not in (None, position):
            return take

        def begin_step() -> None:
            if take is not None:
                take()
            turn()

        return begin_step

    @property
    def others_wait(self) -> bool:
        """Whether workers with fewer batches may be at the end of the active pass already."""
        position = self._leader
        if position not in self._under_way or position.leased or self.counts:
            return False
        one, batches = self._under_way[position], position.now.batches
        return batches + 1 == one.length and one.fewest() <= batches

    @property
    def leads(self) -> bool:
        """Whether the optimizer steps within a pass over shared data."""
        return self._leader is not None

    @property
    def equal_step(self) -> float:
        """The steps of an equal share for which one of this worker's stands."""
        return sum(self.counts) / len(self.counts) / self.counts[self.world.rank] if self.counts else 1.0

    @property
    def steps_of_pass(self) -> int | None:
        """How many steps this worker makes in the active pass of the loader that it trains on; None if unknown."""
        if (share := self.leading) is None:
            return None
        with contextlib.suppress(TypeError):  # a loader of a stream has no length
            return share.batches_of_worker() // self._accumulated
        return None

    @property
    def _leading_pass(self) -> ActivePass:
        """The active pass in which the optimizer steps; only while there is one, as `leading` tells."""
        assert self._leader is not None
        return self._under_way[self._leader]

    @property
    def _accumulated(self) -> int:
        """Batches of a step in it."""
        one = self._leading_pass
        return max(1, round((self._batches - one.batches_then) / max(1, self.made - one.steps_then)))

    @property
    def furthest(self) -> list[int] | None:
        """How far this worker is in the pass in which the optimizer steps, as `Iteration.furthest` says, with the
        batches of the steps before it, and whether shares stay equal; None if that pass cannot be dealt anew."""
        if (share := self.leading) is None or (place := share.iteration.furthest) is None:
            return None
        return [*place, self._leading_pass.steps_then * self._accumulated, self.equal]

    def deal(self, counts: tuple[int, ...], furthest: Sequence[list[int] | None]) -> bool:
        """Deal batches by these counts from now on, given how far each worker is; whether all are in one pass.

        Without counts all make equally many, those before included; raises `UnsupportedError` where they cannot.
        """
        leading, known = self.leading, [one for one in furthest if one is not None]
        fits = len(known) == len(furthest) and all(one[:2] == known[0][:2] for one in known)
        if counts:
            if leading is None or not fits:
                return False
            self.counts, self.dealt = counts, True
            leading.iteration.deal(counts, max(one[2] for one in known))
            return True
        made = [had + before for _, _, _, had, before, _ in known]
        lacks, left = [max(made) - one for one in made], tuple[int, ...]()
        if leading is not None and fits:
            left = leading.iteration.even_out([one[3] for one in known], lacks)
        ends = [more - one for one, more in zip(lacks, left, strict=False)]
        if not ends or max(ends) - min(ends) > 1:
            self.refuse(CALLED_WITHIN)
        self.counts = tuple(max(1, one) for one in left)
        return True

    @property
    def leading(self) -> SharedLoader | None:
        """The shared loader in whose pass the optimizer steps, while that pass is active."""
        if self._leader not in self._under_way:
            return None
        return next((share for share in self._recent if share.goes_by(self._leader)), None)

    def under_way(self, loader: Any) -> SharedLoader | None:
        """The share of a loader while a pass over it is active."""
        share = self._shares.get(id(loader))
        return share if share is not None and any(share.goes_by(one) for one in self._under_way) else None

    def compare_wholes(self, meet: Callable[[int], list[int]]) -> None:
        """At the end of the run, on all workers, whose numbers `meet` gives: warn where the data that each reads as a
        whole differ by worker."""
        if not self._data.positions:  # a program that shares no data meets nobody
            return
        number = self._data.positions.index(self._leader) if self._leader in self._data.positions else -1
        sums = {checksum for checksum in meet(self._wholes.get(number, 0)) if checksum}
        if len(sums) > 1:
            self.warn(
                "whole",
                "every worker reads a stream as a whole and takes its own batches of it, and the first batches differ "
                "by worker: if it shuffles, samples come twice or never; shuffle by a seed that all workers share",
            )

    # -- over time --------------------------------------------------------------------------------

    def holding(self) -> list[Mark]:
        """The leased places whose work is not pushed yet."""
        held = [mark for position in self._data.positions for mark in (*position.begun(), *position.held)]
        return [*self._in_hand, *self._coming, *held]

    @property
    def epoch(self) -> int:
        """The active or next epoch of the first loader."""
        return self._data.positions[0].epoch if self._data.positions else self._epoch

    def stepped(self, steps: int) -> int:
        """The optimizer made step number `steps`; returns the number of samples in it."""
        self._check_reader()
        self._trainer = threading.get_ident()
        if self._under_way and self._leader not in self._under_way:  # it may make its data again for each epoch
            position = next(iter(self._under_way))
            self._earlier, self._leader = self._before(position), position
            one = self._under_way[position]
            if one.length is not None and not position.others:
                if not one.fewest():
                    many = f"the training data have fewer samples than there are workers ({self.world.size})"
                    self.refuse(f"{many}: some would train on none; take fewer workers")
                self.led(one.length // max(1, self._batches - one.batches_then))
        self.made += 1
        self.equal_steps += self.equal_step
        new = self.since[0]
        self.samples += new
        self.since = (0, 0, 0)
        known, places = len(self._rows), self._data.positions
        rows = [*self._rows, *([one.epoch, one.now.batches] for one in places[known:])]
        for number in self._data.live:
            rows[number] = [places[number].epoch, places[number].now.batches]
        self._rows = rows
        self._steps.append((steps, rows))
        if self.places is not None:
            self.places.stepped(steps)
        return new

    def _check_reader(self) -> None:
        """Refuse a pass that another thread goes through: it is ahead, so nothing tells which batches a step used, or
        when the program is at the end of the pass."""
        position = self._training
        one = self._last_pass if position is None else self._under_way[position]
        if one is None or self.world.size == 1:
            return
        reader = one.reader
        if reader not in (0, threading.get_ident()):
            names = {thread.ident: thread.name for thread in threading.enumerate()}
            self.refuse(
                f"the thread {names.get(reader, 'that has ended')} reads the training data ahead, and "
                f"{threading.current_thread().name} trains on them: {self.world.size} workers would not know which "
                "batches a step has used. Iterate over the loader in the thread that trains, and let it read "
                "ahead by itself: DataLoader(.., num_workers=2, prefetch_factor=2)"
            )

    def _trains_here(self) -> bool:
        """Whether this is the thread that trains, as far as that is known."""
        if self._trainer is not None:
            return self._trainer == threading.get_ident()
        return virtual.current() is not None or threading.current_thread() is threading.main_thread()

    def entered(self, steps: int) -> None:
        """The work of this worker's first `steps` steps is in the global model."""
        reached: dict[tuple[int, int], int] = {}  # number and epoch -> batches: of many steps the last one tells all
        while self._steps and self._steps[0][0] <= steps:
            places = self._steps.popleft()[1]
            reached |= {(n, places[n][0]): places[n][1] for n in self._data.live if n < len(places)}
        for (number, epoch), batches in reached.items():
            self._data.positions[number].entered(epoch, batches)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "since": list(self.since),
            "positions": [position.state() for position in self._data.positions],
            "steps": [[steps, places] for steps, places in self._steps],
            "in_hand": [list(mark) for mark in self._in_hand],
            "ledger": self.leases.state() if self.leases is not None else None,
            **({"places": self.places.state()} if self.places is not None else {}),
            **({"counts": [list(self.counts), self.equal_steps, self.equal]} if self.dealt else {}),
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state` of the same number of workers, also for loaders that are shared later."""
        samples, batches, nominal = state["since"]
        self.samples, self.since, self._rows = state["samples"], (samples, batches, nominal), []
        counts, self.equal_steps, self.equal = [*state.get("counts", [(), 0.0]), False][:3]
        self.counts, self.dealt = tuple(counts), "counts" in state
        self._steps = deque((steps, places) for steps, places in state["steps"])
        self._in_hand = [(loader, epoch, begin, end) for loader, epoch, begin, end in state["in_hand"]]
        self._place([partial(Position.load, state=row) for row in state["positions"]])
        if self.places is not None:
            self.places.load(state.get("places", [[], []]))
        if self.leases is not None and state["ledger"] is not None:
            self.leases.load(state["ledger"])

    def regroup(self, states: list[dict[str, Any]]) -> None:
        """Restore a checkpoint of another number of workers, in rank order; what remains of an epoch, whose order is
        the same for any number, is split among the present ones."""
        self.samples = sum(state["samples"] for state in states) // self.world.size
        self.since, self._in_hand, self._steps = (0, 0, 0), [], deque()
        if self.places is not None:
            self.places.load([[], []])
        ledger = next((state["ledger"] for state in states if state["ledger"] is not None), None)
        rows = zip(*(state["positions"] for state in states), strict=False)
        load = partial(Position.regroup, ledger=ledger)
        places = self._place([partial(load, states=list(row), loader=number) for number, row in enumerate(rows)])
        if self.leases is None:
            return
        for number, position in enumerate(places):
            if position.epoch > 0:
                self.leases.expect(number, position.epoch - 1, Ranges())
            for epoch, rest in position.rest.items():
                self.leases.expect(number, epoch, rest)

    def follow(self, state: dict[str, Any]) -> None:
        """Start at the position of another worker of the run, whose data are leased, without its leases."""
        self._place([partial(Position.follow, state=row) for row in state["positions"]])

    def _place(self, loads: Sequence[Load]) -> list[Position]:
        """Set the position of every shared loader, and of those that are shared later."""
        self._loaded, shared = loads, list(self._data.positions)
        places = [*shared[: len(loads)], *(Position() for _ in loads[len(shared) :])]
        for load, position in zip(loads, places, strict=True):
            load(position)
        if places:
            self._epoch = places[0].epoch
        return places


_END = object()


class SharedLoader:
    """A worker's part of a loader; iterate it once for each epoch.

    Args:
        loader: a `DataLoader`, or any iterable of batches that every worker sees in the same order.
        number: of the loader's data, alike on all workers.
        position: this worker's.
        registry: counts every batch.
        leases: the connection to the ledger; None for an even split.
        again: whether its data were shared before.
    """

    measured = False
    """Whether the program has asked for the length."""

    def __init__(
        self,
        loader: Iterable[Any],
        number: int,
        position: Position,
        registry: LoaderRegistry,
        leases: Leases | None = None,
        again: bool = False,
    ) -> None:
        self.loader, self._position, self._registry, self._leases = loader, position, registry, leases
        position.leased = leases is not None
        self.iteration = Iteration(loader, number, position, registry, leases)
        self._before = (0, 0, 0)
        self.again = again

    @property
    def _world(self) -> World:
        return self._registry.world

    # -- for the program --------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The active or next epoch; the first is 0."""
        return self._position.epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to this epoch, as with `DistributedSampler`.

        Raises:
            UnsupportedError: places are leased, and the epoch lies before the present one.
        """
        if self._leases is not None and epoch < self._position.epoch:
            self._registry.refuse(
                f"set_epoch({epoch}) goes back from epoch {self._position.epoch}, and under an asynchronous rule "
                "an epoch that has been gone through is over; count on, or use run.share(loader, even=True)"
            )
        self._position.go_to(epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "loader":
            raise AttributeError(name)
        return getattr(self.loader, name)  # dataset, batch_size, ...

    @property
    def progress(self) -> float:
        """The fraction of the epoch that was handed out; a schedule can follow it under every rule.

        If batches are leased, it follows the furthest place that this worker was given, not its own steps.
        """
        iteration = self.iteration
        epoch, place = iteration.reached
        if self._leases is None and iteration.shards is None:
            return min(1.0, self._position.now.batches / max(1, self._length() or ENDLESS))
        if iteration.shards is not None:
            total = iteration.shards.places
        else:
            total = iteration.plan.places(epoch) if iteration.plan is not None else len(self.loader)  # type: ignore[arg-type]
        return place / max(1, total) if epoch == self._position.epoch else 0.0

    @property
    def leased(self) -> bool:
        """Whether its batches are leased, so that a fast worker gets more of them."""
        return self._leases is not None

    def goes_by(self, position: Position | None) -> bool:
        """Whether `position` is this loader's."""
        return self._position is position

    def __len__(self) -> int:
        """Batches of this worker in an epoch; if they are leased, as if all workers were equally fast."""
        self.measured = True
        shown = sys._getframe(1).f_globals.get("__name__", "").startswith("tqdm")
        if self._leases is not None and self._world.size > 1 and not shown:
            self._registry.warn(
                "length",
                "the length of a shared loader is that of an even split, and under an asynchronous rule a fast worker "
                "gets more batches and a slow one fewer, so that the last one cannot be known by it; use "
                "run.share(loader, even=True), or share.progress",
            )
        return self.batches_of_worker()

    def batches_of_worker(self, rank: int | None = None) -> int:
        """The same, for code that is not the program's; `rank` is that of another worker. `TypeError` where the loader
        has no length."""
        world = self._world if rank is None else replace(self._world, rank=rank)
        plan = self.iteration.chosen
        if plan is None:
            return self._batches_of_iterable(len(self.loader), world.rank)  # type: ignore[arg-type]
        batches = plan.batches(self._position, world)
        if batches is None:
            raise TypeError(f"a loader whose {type(self.loader).__name__} has no end has no length")
        return batches

    def _batches_of_iterable(self, length: int, rank: int) -> int:
        full, rest = divmod(length, self._world.size)
        if not rest or are_whole(self.loader):
            return full
        batch = getattr(self.loader, "batch_size", None)
        samples = [batch or self._world.size] * rest
        if batch and isinstance(self.loader, DataLoader):
            samples[-1] = len(self.loader.dataset) - (length - 1) * batch  # type: ignore[arg-type]
        return full + has_piece(samples, self._world.size, rank)

    # -- the pass ---------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        return self.batches()

    def batches(self) -> Generator[Any, None, None]:
        """One pass; closing the generator ends the pass early."""
        self._registry.ready()
        if self._position.active is not None:
            self._position.let_go()
        self._registry.leave(self._position)
        self._registry.settle()
        skip = self._position.begin()
        batches = self.iteration.batches(skip, self._length)
        if self._leases is not None:
            self._position.hold(batches)
        self._before = self._registry.since
        token = self._registry.begins(self._position, self.iteration.length, self._fewest)
        complete = False
        try:
            while True:
                self._check_alone(batches)
                take = self._registry.asked(self._position)  # decided before the next batch is fetched
                began = time.perf_counter()
                batch = next(batches, _END)
                self._registry.waited(time.perf_counter() - began)
                if batch is _END:
                    break
                if take is not None:
                    take()
                yield batch
            complete = True
        finally:
            self._registry.ends(self._position, token, complete)
            batches.close()
        if complete:
            self._position.end()
        self._registry.settle()

    def leave(self) -> None:
        """The program has left its pass, of which it may still hold the iterator."""
        self._registry.leave(self._position)

    @property
    def read_as_a_whole(self) -> bool:
        """Whether every worker iterates over the whole loader, and takes its own batches."""
        iteration = self.iteration
        return iteration.plan is None and iteration.listed is None and iteration.shards is None

    # -- a pass that turns out to be an evaluation ------------------------------------------------

    @property
    def completes(self) -> bool:
        """Whether `rest` can give the other workers' batches of the epoch."""
        plan = self.iteration.chosen
        return isinstance(plan, SamplingPlan) and self._leases is None and plan.can_complete(self._world.size)

    @property
    def full_batch(self) -> bool:
        """Whether a worker's first batch is a whole batch of the loader."""
        plan = self.iteration.chosen
        return not isinstance(plan, SamplingPlan) or plan.places(self._position.epoch) >= plan.unit * self._world.size

    def rest(self, epoch: int, batches: int) -> Iterator[Any]:
        """The other workers' batches of a pass without training, of which this one has seen its first `batches`.

        That pass must be over or closed.
        """
        self._registry.untrained(self._before)
        return self.iteration.rest_of(epoch, batches)

    def _length(self, rank: int | None = None) -> int | None:
        with contextlib.suppress(TypeError):  # an iterable without a length
            return self.batches_of_worker(rank)
        return None

    def _fewest(self) -> int:
        """Batches of the worker that has the fewest in this pass; without a length nobody knows."""
        lengths = map(self._length, range(self._world.size))
        return min(ENDLESS if length is None else length for length in lengths)

    def _check_alone(self, batches: Generator[Any, None, None]) -> None:
        if self._leases is not None and self._position.active is not batches:
            self._registry.refuse(
                "another pass over the same data has begun within this one, and this one's leases went to "
                "other workers; share the inner loader with a dataset of its own, such as copy.copy(dataset)"
            )
