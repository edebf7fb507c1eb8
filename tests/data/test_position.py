# SPDX-License-Identifier: Apache-2.0
"""A position resumed by other workers: what is in the global model stays there, and the rest enters exactly once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, WeightedRandomSampler

import paceline
from paceline.core.state_tree import build, flatten
from paceline.data.sampling.position import Position, ShardProgress
from paceline.errors import CheckpointError
from paceline.forecast.sim import Clock
from tests.data.test_shared_loader import Buckets, Numbers, Reversed
from tests.tables import dealt

Seen = list[tuple[int, list[int]]]
"""(epoch, batch) in the order of a worker's work."""
Make = Callable[[], Iterable[Any]]
UNEVEN = Clock(compute=[1.0, 0.5, 0.33, 0.2])
EPOCHS = 3


class Stream(IterableDataset[int]):
    """31 numbers that come by themselves."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(31))


class EagerBuckets(Sampler[list[int]]):
    """Draws when it is asked for an iterator, not when that is asked for a batch."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[int(i) for i in part] for part in torch.randperm(31).split([5, 1, 7, 2, 6, 4, 3, 3])])

    def __len__(self) -> int:
        return 8


class Sharded(Numbers):
    """Numbers in files."""

    shard_sizes = (3, 9, 1, 0, 10, 8)
    shuffle_buffer = 2


LOADERS: dict[str, Make] = {
    "shuffle": lambda: DataLoader(Numbers(31), 2, shuffle=True),
    "generator": lambda: DataLoader(Numbers(31), 2, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "sequential": lambda: DataLoader(Numbers(31), 2),
    "ones": lambda: DataLoader(Numbers(31), 1, shuffle=True),
    "sampler": lambda: DataLoader(Numbers(31), 2, sampler=Reversed(31)),
    "random sampler": lambda: DataLoader(Numbers(31), 2, sampler=RandomSampler(Numbers(31))),
    "batch sampler": lambda: DataLoader(Numbers(31), batch_sampler=BatchSampler(Reversed(31), 2, False)),
    "buckets": lambda: DataLoader(Numbers(31), batch_sampler=Buckets()),
    "eager buckets": lambda: DataLoader(Numbers(31), batch_sampler=EagerBuckets()),
    "shards": lambda: DataLoader(Sharded(31), 2, shuffle=True),
    "list": lambda: torch.arange(31).split(2),
    "stream": lambda: DataLoader(Stream(), 2),
}


class Job:
    """A program that trains and can be stopped and gone on with."""

    def __init__(self, make: Make, rule: str, even: bool = False, epochs: int = EPOCHS) -> None:
        self.make, self.rule, self.even, self.epochs = make, rule, even, epochs

    def run(self, workers: int, states: list[Any] | None = None, at: int | None = None) -> tuple[list[Any], Seen]:
        """On so many workers, from these states, until each has made `at` steps: (states, what has entered)."""
        found = paceline.simulate(lambda: self._program(states, at), workers, clock=UNEVEN)
        seen = [one for _, own in found for one in own]
        return [state for state, _ in found], seen

    def _program(self, states: list[Any] | None, at: int | None) -> tuple[Any, Seen]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = paceline.attach(model, optimizer, self.rule, seed=4)
        shared = run.share(self.make(), self.even)
        if states is not None:
            run._context.loaders.regroup(states)
            run._transport.barrier()
        seen: Seen = []
        for epoch in range(run.epoch, self.epochs):
            for batch in shared:
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                seen.append((epoch, torch.as_tensor(batch).view(-1).tolist()))
                if len(seen) == at:
                    return self._stop(run, seen)
        run.close()
        return None, seen

    def _stop(self, run: paceline.Run, seen: Seen) -> tuple[Any, Seen]:
        state = through_a_file(run._state.capture()["data"])
        merged = run._engine.steps_committed if run._engine is not None else len(seen)
        run.abandon()
        return state, seen[:merged]


def through_a_file(state: Any) -> Any:
    """As a checkpoint keeps it."""
    tensors: dict[str, Tensor] = {}
    return build(json.loads(json.dumps(flatten(state, tensors, ""))), tensors)


def check(seen: Seen, epochs: int = EPOCHS, n: int = 31) -> None:
    counts = [Counter(i for one, batch in seen if one == epoch for i in batch) for epoch in range(epochs)]
    for epoch, count in enumerate(counts):
        wrong = {i: count[i] for i in range(n) if count[i] != 1}
        assert not wrong and len(count) == n, (epoch, wrong)


@pytest.mark.parametrize(
    ("name", "before", "after", "rule"),
    dealt([(name,) for name in LOADERS], [(1, 3, "sync"), (3, 1, "asgd"), (4, 3, "sync")]),
)
def test_what_is_left_is_split_among_others(name: str, before: int, after: int, rule: str) -> None:
    job = Job(LOADERS[name], rule)
    for at in (1, 3, 5):
        states, entered = job.run(before, at=at)
        check(entered + job.run(after, states)[1])


@pytest.mark.parametrize("name", ["shuffle", "buckets", "stream"])
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1)])
def test_batches_since_the_last_block_do_not_count(name: str, before: int, after: int) -> None:
    job = Job(LOADERS[name], "averaging(period=4)")
    for at in (3, 4, 5):  # inside of the pass on all workers
        states, entered = job.run(before, at=at)
        check(entered + job.run(after, states)[1])


@pytest.mark.parametrize("at", [1, 4, 7, 8, 9, 16])
@pytest.mark.parametrize("rule", ["sync", "asgd"])
def test_wherever_it_stops(at: int, rule: str) -> None:
    """Eight steps an epoch (two workers): within it, at its last step, and in the next."""
    job = Job(LOADERS["shuffle"], rule)
    states, entered = job.run(2, at=at)
    check(entered + job.run(3, states)[1])


@pytest.mark.parametrize("name", ["shuffle", "shards", "buckets", "stream", "batch sampler"])
@pytest.mark.parametrize("rule", ["sync", "asgd"])
def test_several_times_in_one_epoch(name: str, rule: str) -> None:
    job = Job(LOADERS[name], rule)
    states, seen = job.run(1, at=2)
    for workers in (2, 3, 1):
        states, entered = job.run(workers, states, at=2)
        seen += entered
    check(seen + job.run(4, states)[1])


@pytest.mark.parametrize("at", [1, 3, 5, 9])
def test_a_split_that_is_even_under_an_asynchronous_rule(at: int) -> None:
    job = Job(LOADERS["shuffle"], "asgd", even=True)
    states, entered = job.run(2, at=at)
    check(entered + job.run(3, states)[1])


def test_a_draw_with_replacement_is_kept_as_it_was() -> None:
    """One sample may stand at several places; each place enters once: so the counts are those of the draw."""

    def make() -> DataLoader[int]:
        return DataLoader(Numbers(9), 2, sampler=WeightedRandomSampler([1.0] * 9, 20))

    job = Job(make, "sync")
    whole = Counter(i for epoch, batch in job.run(2)[1] if epoch == 0 for i in batch)
    states, entered = job.run(2, at=2)
    seen = entered + job.run(3, states)[1]
    assert Counter(i for epoch, batch in seen if epoch == 0 for i in batch) == whole


# -- by hand --------------------------------------------------------------------------------------


def state_of(epoch: int, *passes: list[Any], **about: Any) -> dict[str, Any]:
    rest = {"rest": [], "played": [], "epoch_start": None, "leased": False, "arranged": []}
    rows = [[*one, ShardProgress().state()] for one in passes]
    return {"epoch": epoch, "passes": rows, **rest, **about}


def regrouped(*states: dict[str, Any]) -> Position:
    position = Position()
    position.regroup(list(states), None, 0)
    return position


def test_the_rest_of_an_epoch_by_hand() -> None:
    """20 places in rounds of two batches of 2: one worker has 3 of its batches in the model, the other 2."""
    cut = ["rounds", 20, 2, 2]
    position = regrouped(state_of(0, [0, cut, 4, 3]), state_of(0, [0, cut, 3, 2]))
    assert position.epoch == 0 and position.rest[0].state() == [[10, 20]]
    position = regrouped(state_of(0, [0, cut, 4, 2]), state_of(0, [0, cut, 3, 3]))
    assert position.rest[0].state() == [[8, 10], [12, 20]]


def test_a_whole_epoch_that_waits_for_its_block_is_done_again() -> None:
    """Two epochs of two batches in one block that is not merged yet, and the third has begun."""
    cut = ["rounds", 4, 1, 2]
    position = regrouped(*[state_of(2, [0, cut, 2, 1], [1, cut, 2, 0], [2, cut, 1, 0])] * 2)
    assert position.epoch == 0 and [(k, rest.state()) for k, rest in position.rest.items()] == [
        (0, [[2, 4]]),
        (1, [[0, 4]]),
        (2, [[0, 4]]),
    ]


def test_a_checkpoint_of_a_pass_whose_number_of_workers_grew_is_refused_by_name() -> None:
    """Its rows say at the end where the number changed; nothing reads that any more."""
    state = state_of(1, [0, ["rounds", 20, 2, 2], 4, 4], [1, ["rounds", 20, 2, 2], 3, 2])
    state["passes"][1].append([[0, 2], [2, 4]])
    for load in (lambda: regrouped(state, state), lambda: Position().load({**state, "held": [], "generators": []})):
        with pytest.raises(CheckpointError, match="made in epoch 1, within which the number of workers grew"):
            load()
