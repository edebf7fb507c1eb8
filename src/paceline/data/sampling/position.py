# SPDX-License-Identifier: Apache-2.0
"""How far a worker is in its data, and what remains of an epoch for another number of workers.

Of shards of unknown length, sample i of the k-th of an epoch's order is at place k `UNIT` + i. So a shard is the range
k `UNIT` .. (k + 1) `UNIT` (excl.), of which the places after its last sample are done together with that sample.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.data.ledger.epoch_ledger import ENDLESS, Mark
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Range, Ranges
from paceline.data.sampling.split import Cut, split_of
from paceline.errors import CheckpointError

UNIT = 1 << 40
"""Places of a shard."""
MOST_SHARDS = 1 << 20
"""Keeps places at or below 2^60, well below `ENDLESS`."""


def cut_at_shards(rest: Iterable[Range]) -> list[Range]:
    """Cut ranges of places where one shard ends and the next begins."""
    parts = []
    for begin, end in rest:
        while begin < end:
            middle = min(end, (begin // UNIT + 1) * UNIT)
            parts.append((begin, middle))
            begin = middle
    return parts


def round_robin(rest: Iterable[Range], workers: int, rank: int) -> Ranges:
    """The places that worker `rank` reads under rules without leases: every N-th of the remaining shards."""
    return Ranges(cut_at_shards(rest)[rank::workers])


class ShardProgress:
    """The places that one worker handed out in a pass, by the number of the batch that held them."""

    def __init__(self, state: Sequence[Any] = ((), ())) -> None:
        self.entered = Ranges(state[0])
        """Places whose work is in the global model."""
        self._later = deque((batches, [(begin, end) for begin, end in places]) for batches, places in state[1])

    def add(self, batches: int, places: list[Range]) -> None:
        """These places were handed out, the last of them with batch number `batches` (from 1)."""
        self._later.append((batches, places))

    def enter(self, batches: int) -> None:
        """The work of the first `batches` batches is in the global model."""
        while self._later and self._later[0][0] <= batches:
            for begin, end in self._later.popleft()[1]:
                self.entered.add(begin, end)

    @property
    def all(self) -> Ranges:
        """All places that were handed out."""
        return Ranges([*self.entered, *(one for _, places in self._later for one in places)])

    def state(self) -> list[Any]:
        later = [[batches, [list(one) for one in places]] for batches, places in self._later]
        return [self.entered.state(), later]


@dataclass
class Pass:
    """This worker's pass over one epoch."""

    cut: Cut | None = None  # how the epoch was split; None before the first batch
    batches: int = 0  # handed out
    entered: int = 0  # those of them whose work is in the global model
    shard_progress: ShardProgress | None = None  # their places, if the epoch is split into shards of unknown length

    def in_shards(self) -> ShardProgress:
        """The places of its batches, as the epoch is split into shards of unknown length."""
        self.shard_progress = self.shard_progress or ShardProgress()
        return self.shard_progress

    @property
    def endless(self) -> bool:
        """Whether the epoch's length was unknown."""
        return self.cut is not None and self.cut[1] == ENDLESS


class Position:
    """How far a worker is in its data."""

    def __init__(self) -> None:
        self.epoch, self.fresh = 0, True  # passes that have begun, less one; whether none of its batches was requested
        self.now = Pass()
        self._passes = {0: self.now}  # the present one, and those whose last work has not entered
        self.rest: dict[int, Ranges] = {}  # epoch -> the places that remained when it was split; else it was whole
        self.played: dict[int, dict[str, Any]] = {}  # epoch -> random state then, if one worker's loader gave the order
        self.leased = False  # whether its places are leased, so that the ledger records what is done
        self.arranged: dict[int, int] = {}  # epoch -> number of workers for which its order was made
        self.held: deque[Mark] = deque()  # leases that are not begun
        self.active: Generator[Any, None, None] | None = None  # the pass that is under way, if its places are leased
        self.begun: Callable[[], list[Mark]] = list  # returns the places of batches that are being made
        self.epoch_start: dict[str, Any] | None = None  # random state then, if the user's own loader is iterated
        self.generators: list[torch.Generator] = []  # the loader's own
        self._loaded: list[Tensor] = []

    # -- over time --------------------------------------------------------------------------------

    def let_go(self) -> None:
        """End the active pass; its leases are returned."""
        if self.active is not None:
            self.active.close()
        self.active = None

    def hold(self, iteration: Generator[Any, None, None]) -> None:
        """`iteration` is the active pass, whose places are leased."""
        self.active = iteration

    def starts_epoch(self, state: dict[str, Any]) -> None:
        """The user's own loader begins an epoch with this random state."""
        self.epoch_start = state

    def begin(self) -> int:
        """Start to iterate; returns the number of batches to skip (above 0 only after a resume)."""
        if not self.fresh:  # the program left the last pass early: drop the rest of it
            self.go_to(self.epoch + 1)
        self.fresh = False
        return self.now.batches

    def split(self, cut: Cut | None) -> None:
        """The present epoch is split like this."""
        self.now.cut = cut

    def end(self) -> None:
        """The epoch is complete."""
        self._go_on(self.epoch + 1)

    def go_to(self, epoch: int) -> None:
        """Go to the start of `epoch`."""
        if epoch != self.epoch:
            self._passes.pop(self.epoch)
            self._go_on(epoch)

    def _go_on(self, epoch: int) -> None:
        if epoch > self.epoch:
            self.rest.pop(self.epoch, None)
            self.played.pop(self.epoch, None)
            self.arranged.pop(self.epoch - 1, None)  # batches of the last epoch may still be leased
        self.epoch, self.fresh = epoch, True
        self.held.clear()
        self.now = self._passes[epoch] = Pass()
        self._tidy()

    def _tidy(self) -> None:
        """Drop passes whose work has all entered, except the last one of a stream: it alone tells the length."""
        for epoch, one in sorted(self._passes.items()):
            last_of_stream = epoch == self.epoch - 1 and one.endless
            if epoch != self.epoch and one.entered == one.batches and not last_of_stream:
                del self._passes[epoch]

    def entered(self, epoch: int, batches: int) -> None:
        """The work of the first `batches` batches of an epoch is in the global model."""
        one = self._passes.get(epoch)
        if one is not None:
            one.entered = batches
            if one.shard_progress is not None:
                one.shard_progress.enter(batches)
            self._tidy()

    @property
    def settled(self) -> bool:
        """Whether the work of all batches that were handed out is in the global model."""
        return not self.held and all(one.entered == one.batches for one in self._passes.values())

    def strip(self) -> None:
        """The program dropped the data: drop what only another pass would need."""
        self.epoch_start, self.generators, self.active, self.begun = None, [], None, list

    @property
    def others(self) -> bool:
        """Whether the epoch was begun by another number of workers."""
        return self.epoch in self.rest

    def track(self, generators: list[torch.Generator]) -> None:
        """Save and restore these generators, which the user's loader draws from, with the position."""
        self.generators = generators
        if generators and self._loaded:
            set_states(generators, self._loaded)
            self._loaded = []

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "passes": [
                [epoch, one.cut and list(one.cut), one.batches, one.entered, one.in_shards().state()]
                for epoch, one in sorted(self._passes.items())
            ],
            "rest": [[epoch, rest.state()] for epoch, rest in self.rest.items()],
            "played": [[epoch, start] for epoch, start in self.played.items()],
            "leased": self.leased,
            "arranged": [list(pair) for pair in self.arranged.items()],
            "held": [list(mark) for mark in (*self.begun(), *self.held)],
            "epoch_start": self.epoch_start,
            "generators": [generator.get_state() for generator in self.generators],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Restore `state` of the same number of workers; the next pass continues there."""
        self.epoch, self.fresh = state["epoch"], True
        self._passes = passes_of(state)
        self.now = self._passes[self.epoch]
        self.rest = {epoch: Ranges(rest) for epoch, rest in state["rest"]}
        self.played = {epoch: start for epoch, start in state["played"]}
        self.arranged = {epoch: workers for epoch, workers in state["arranged"]}
        self.held = deque((loader, epoch, begin, end) for loader, epoch, begin, end in state["held"])
        self.epoch_start, self._loaded = state["epoch_start"], state["generators"]
        self.track(self.generators)

    def regroup(self, states: list[dict[str, Any]], ledger: dict[str, Any] | None, loader: int) -> None:
        """Restore a checkpoint of another number of workers, given their states in rank order; what remains is split
        again. `loader` is the number of this loader in the `ledger` then, if there was one."""
        self.held.clear()
        self.epoch_start, self._loaded, self.fresh = None, [], True
        self.played = {epoch: start for epoch, start in states[0]["played"]}
        self.arranged = {epoch: workers for state in states for epoch, workers in state["arranged"]}
        if ledger is not None and any(state["leased"] for state in states):
            then = Ledger()
            then.load(ledger)
            self.rest, begun = then.epochs.unfinished(loader), [state["epoch"] for state in states]
            self.epoch = min(self.rest, default=max(then.epochs.closed(loader) + 1, *begun))
        else:
            self.rest = {epoch: Ranges(rest) for epoch, rest in states[0]["rest"]}
            begun = sorted({epoch for state in states for epoch in passes_of(state)})
            for epoch in begun:
                self._regroup_epoch(epoch, states)
            self.epoch = next((epoch for epoch in begun if self.rest.get(epoch, True)), begun[-1] + 1)
        self.rest = {epoch: rest for epoch, rest in self.rest.items() if epoch >= self.epoch}
        self.now = Pass()
        self._passes = {self.epoch: self.now}

    def follow(self, state: dict[str, Any]) -> None:
        """Start in the epoch of another worker of the run; the ledger records what is done of it."""
        begins = [[state["epoch"], None, 0, 0, ShardProgress().state()]]
        self.load({**state, "passes": begins, "held": [], "epoch_start": None, "generators": []})

    def _regroup_epoch(self, epoch: int, states: list[dict[str, Any]]) -> None:
        """Set what remains of one epoch: its split without what has entered."""
        passes = [passes_of(state).get(epoch) for state in states]
        cut = next((one.cut for one in passes if one is not None and one.cut is not None), None)
        if cut is None:
            return
        begun = [one for one in passes if one is not None]
        if all(state["epoch"] > epoch for state in states) and all(one.entered == one.batches for one in begun):
            self.rest[epoch] = Ranges()
            return
        before = self.rest.get(epoch, Ranges([(0, cut[1])]))
        if cut[0] == "shards":
            read: list[Range] = []
            for rank, (one, state) in enumerate(zip(passes, states, strict=True)):
                own = round_robin(before, len(states), rank) if state["epoch"] > epoch else Ranges()
                read += own if one is None else one.in_shards().entered
            self.rest[epoch] = before.without(read)
            return
        split, rounds = split_of(cut), []
        for rank, (one, state) in enumerate(zip(passes, states, strict=True)):
            # the length of a stream that ended earlier is unknown
            whole = max(one.entered for one in begun) if cut[1] == ENDLESS else split.batches(rank)
            rounds.append(one.entered if one is not None else whole if state["epoch"] > epoch else 0)
        done = [place for begin, end in split.done(rounds) for place in before.cut(begin, end)]
        self.rest[epoch] = before.without(done)
        if len(states) == 1 and epoch not in self.played and states[0]["epoch_start"] is not None:
            self.played[epoch] = states[0]["epoch_start"]


def passes_of(state: dict[str, Any]) -> dict[int, Pass]:
    """epoch -> pass, from a saved position."""
    grown = next((row[0] for row in state["passes"] if len(row) > 5), None)
    if grown is not None:
        raise CheckpointError(
            f"the checkpoint was made in epoch {grown}, within which the number of workers grew (grow=): only elastic "
            "runs grow now; resume from a checkpoint of before or after that pass"
        )
    return {
        epoch: Pass(tuple(cut) if cut is not None else None, batches, entered, ShardProgress(shard_progress))
        for epoch, cut, batches, entered, shard_progress in state["passes"]
    }


def set_states(generators: list[torch.Generator], states: list[Tensor]) -> None:
    """Restore the states of generators."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state)
