# SPDX-License-Identifier: Apache-2.0
"""A pass over a loader during which the number of workers that train grows (:mod:`paceline.data.sampling.dealing`)."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import ENDLESS
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling.assignment import Assignment
from paceline.data.sampling.batches import are_whole, piece_of_rest, samples_in
from paceline.data.sampling.dealing import Dealt, DealtAssignment, Turn, stages_of
from paceline.data.sampling.position import Cut, Position
from paceline.data.sampling.sampler import SamplingPlan
from paceline.data.sampling.split import split_of
from paceline.data.sharing.lists import ListPlan
from paceline.errors import UnsupportedError


class StagedPass:
    """A worker's batches of a pass in stages.

    Args:
        position: this worker's.
        world: gives this worker.

    Attributes:
        dealt: the last pass in stages; None before there was one.
    """

    def __init__(self, position: Position, world: Callable[[], World]) -> None:
        self._position, self._world = position, world
        self.dealt: Dealt | None = None

    def batches(self, make: Callable[[int], Generator[Any, None, None]]) -> Generator[Any, None, None]:
        """All batches; `make` gives those from a round on, and does so anew where the number of workers has changed.

        What was made ahead by then is made again, by the worker that trains on it now.
        """
        turns: list[Turn] = []
        while turns != self._position.now.turns:
            turns = list(self._position.now.turns)
            made = make(self._position.now.batches)
            for batch in made:
                yield batch
                if turns != self._position.now.turns:
                    made.close()
                    break

    def assignment(
        self, plan: SamplingPlan | ListPlan, rest: Ranges, first: int, begin: Callable[[Cut], None]
    ) -> Assignment:
        """This worker's part of the epoch's places `rest`, from round `first` on.

        `begin` is called with how the epoch is split, when a pass begins.
        """
        epoch, world = self._position.epoch, self._world()

        def part_of(rank: int, workers: int) -> int:
            return plan.stripe_of(replace(world, rank=rank, size=workers), epoch)

        if isinstance(plan, SamplingPlan) and plan.streamed(epoch) is not None:
            raise UnsupportedError(
                world.sign(
                    f"{type(plan.sampler).__name__} is too long to hold, or has no end: it is not split among a number "
                    "of workers that grows; leave grow out, or let the sampler end after each epoch"
                )
            )
        return DealtAssignment(epoch, self._deal(plan.cut, rest, begin), world.rank, part_of, first, plan.tail)

    def _deal(self, cut: Callable[[int, int], Cut], rest: Ranges, begin: Callable[[Cut], None]) -> Dealt:
        """The present pass in stages; `cut`: (places, workers) -> how they are split."""
        turns = self._position.now.turns
        stages = stages_of(turns, rest, lambda places, workers: split_of(cut(places, workers)))
        if self._position.now.cut is None:
            begin(cut(rest.total, turns[0][1]))
        self.dealt = Dealt(stages, split_of(cut(rest.total, self._world().size)))
        return self.dealt

    def rounds(
        self,
        loader: Iterable[Any],
        rest: Ranges | None,
        hand_out: Callable[[Any, int, int], Any],
        begin: Callable[[Cut], None],
    ) -> Generator[Any, None, None]:
        """Rounds of any iterable, each of as many batches as workers train in it."""
        position, rank = self._position, self._world().rank
        drops = are_whole(loader)
        source, places = enumerate(loader), rest if rest is not None else Ranges([(0, ENDLESS)])
        nominal = number = 0
        while True:
            dealt = self._deal(lambda total, workers: ("rounds", total, 1, workers), places, begin)
            workers = dealt.at(number).workers
            round_ = list(islice((batch for place, batch in source if place in places), workers))
            mine = None
            if rank < workers and len(round_) == workers:
                mine = round_[rank]
            elif rank < workers and round_ and not drops:
                mine = piece_of_rest(round_, workers, rank)
            number += 1
            if mine is not None and number > position.now.batches:
                nominal = nominal or samples_in(mine)
                yield hand_out(mine, samples_in(mine), nominal)
            if len(round_) < workers:
                return
