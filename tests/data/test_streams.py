# SPDX-License-Identifier: Apache-2.0
"""Shards that can only be read in order: each by one worker, every sample once, also after a stop in a shard."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline
from paceline.data import ShardStream
from paceline.forecast.sim import Clock
from tests.tables import pairwise

Batch = list[int]
SIZES = [7, 12, 1, 9, 16, 5, 8, 11, 3]


class Counted:
    """Sample i of shard s is 100 s + i. What was opened is told."""

    def __init__(self, sizes: list[int] | None = None) -> None:
        self.sizes = SIZES if sizes is None else sizes
        self.opened: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def read(self, shard: int, skip: int) -> Iterator[int]:
        self.opened.append((shard, skip))
        return iter(range(100 * shard + skip, 100 * shard + self.sizes[shard]))


def everything(sizes: list[int] | None = None) -> list[int]:
    return sorted(100 * s + i for s, size in enumerate(SIZES if sizes is None else sizes) for i in range(size))


def flat(found: Any) -> list[int]:
    return [i for worker in found for batch in worker for i in batch]


class Program:
    """Trains on a stream, one step a batch; returns [epoch][batch] and the state of the data."""

    def __init__(
        self,
        rule: str,
        loader: Callable[[], DataLoader[Any]],
        epochs: int = 2,
        stop: int | None = None,
        to: Path = Path(),
        resume: Path | None = None,
        states: list[Any] | None = None,
        even: bool = False,
    ) -> None:
        self.rule, self.loader, self.epochs, self.stop, self.to = rule, loader, epochs, stop, to
        self.resume, self.states, self.even = resume, states, even

    def __call__(self) -> tuple[list[list[Batch]], Any]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        run = paceline.attach(model, optimizer, self.rule, seed=5)
        if self.resume is not None:
            run.resume(self.resume)
        if self.states is not None:
            run._context.loaders.regroup(self.states)
            run._transport.barrier()
        shared = run.share(self.loader(), even=self.even)
        found: list[list[Batch]] = [[] for _ in range(self.epochs)]
        steps = 0
        for _ in range(run.epoch, self.epochs):
            epoch = shared.epoch
            for batch in shared:
                found[epoch].append(batch.tolist())
                optimizer.zero_grad()
                model(batch.float().view(-1, 1)).mean().backward()
                optimizer.step()
                steps += 1
                if steps == self.stop:
                    return found, self._saved(run)
        run.close()
        return found, None

    def _saved(self, run: paceline.Run) -> Any:
        """Save and go; what the checkpoint says of the data."""
        taken: list[Any] = []
        state_of = run._context.loaders.state

        def state() -> Any:
            taken.append(state_of())
            return taken[-1]

        run._context.loaders.state = state  # type: ignore[method-assign]
        run.save(self.to)
        run.abandon()
        return taken[0]


def loader_of(batch_size: int | None = 4, sizes: list[int] | None = None, **choices: Any) -> DataLoader[Any]:
    stream = {k: choices.pop(k) for k in ("shuffle", "buffer") if k in choices}
    return DataLoader(ShardStream(Counted(sizes), **stream), batch_size, **choices)


def uneven() -> Clock:
    return Clock([1.0, 0.3, 0.6, 2.1])


RULES = ["sync", "bmuf(period=2)", "asgd()"]


@pytest.mark.parametrize(("rule", "workers", "buffer"), pairwise(RULES, [1, 2, 3, 4], [0, 5]))
def test_every_sample_once(rule: str, workers: int, buffer: int) -> None:
    results = paceline.simulate(Program(rule, lambda: loader_of(buffer=buffer)), workers, clock=uneven())
    for epoch in range(2):
        found = [worker[epoch] for worker, _ in results]
        assert sorted(flat(found)) == everything()
        assert all(len({i // 100 for i in batch}) == 1 for worker in found for batch in worker)  # within one shard
    if workers == 1:
        assert flat([results[0][0][0]]) != flat([results[0][0][1]])  # in another order


def test_a_shard_is_read_by_one_worker_only() -> None:
    shards: list[Counted] = []

    def loader() -> DataLoader[Any]:
        shards.append(Counted())
        return DataLoader(ShardStream(shards[-1]), 4)

    paceline.simulate(Program("sync", loader, epochs=1), 3)
    assert sorted(one for own in shards for one in own.opened) == [(k, 0) for k in range(len(SIZES))]
    assert [len(own.opened) for own in shards] == [3, 3, 3]


def test_a_fast_worker_gets_more_shards_under_an_asynchronous_rule() -> None:
    results = paceline.simulate(
        Program("asgd()", lambda: loader_of(sizes=[8] * 40), epochs=1), 2, clock=Clock([1.0, 0.25])
    )
    slow, fast = (len(found[0]) for found, _ in results)
    assert slow + fast == 80 and fast > 2.5 * slow


def test_shards_are_dealt_under_an_asynchronous_rule_where_the_program_wants_so() -> None:
    make: Callable[[], Any] = lambda: loader_of(sizes=[8] * 12)  # noqa: E731
    results = paceline.simulate(Program("asgd()", make, even=True), 3, clock=uneven())
    assert [[len(batches) for batches in found] for found, _ in results] == [[8, 8]] * 3
    for epoch in range(2):
        assert sorted(flat([found[epoch] for found, _ in results])) == everything([8] * 12)


def test_incomplete_batches_can_be_left_out() -> None:
    for rule in ("sync", "asgd()"):
        results = paceline.simulate(Program(rule, lambda: loader_of(drop_last=True)), 2, clock=Clock([1.0, 0.4]))
        for epoch in range(2):
            seen = sorted(i for found, _ in results for batch in found[epoch] for i in batch)
            assert seen == [i for i in everything() if i % 100 < SIZES[i // 100] // 4 * 4]


@pytest.mark.parametrize("choices", [{"sizes": [0, 5, 0, 0, 9, 4, 0]}, {"drop_last": True}])
def test_places_where_nothing_is_are_done_too(choices: dict[str, Any]) -> None:
    def program() -> Any:
        run = paceline.attach(
            model := nn.Linear(1, 1), optimizer := torch.optim.SGD(model.parameters(), 1e-6), "asgd()"
        )
        shared = run.share(loader_of(**choices))
        books: list[Any] = []
        for _ in range(2):
            for batch in shared:
                model(batch.float().view(-1, 1)).mean().backward()
                optimizer.step()
            assert run._context.loaders.leases is not None
            state = run._context.loaders.leases.state()
            books.append([] if state is None else [row["key"][1] for row in state["books"]])
        run.close()
        return books[-1]

    assert all(0 not in books for books in paceline.simulate(program, 2))  # the first epoch's book is closed


@pytest.mark.parametrize(("rule", "workers", "stop"), pairwise(RULES, [1, 2, 3], [1, 3, 8]))
def test_a_run_that_was_stopped_in_a_shard_goes_on_there(rule: str, workers: int, stop: int, tmp_path: Path) -> None:
    make: Callable[[], Any] = lambda: loader_of(sizes=[13] * 9, buffer=3)  # noqa: E731
    first = paceline.simulate(Program(rule, make, stop=stop, to=tmp_path / "c"), workers)
    second = paceline.simulate(Program(rule, make, resume=tmp_path / "c"), workers)
    for epoch in range(2):
        seen = [a[epoch] + b[epoch] for (a, _), (b, _) in zip(first, second, strict=True)]
        assert sorted(flat(seen)) == everything([13] * 9)
    if rule != "asgd()":
        whole = paceline.simulate(Program(rule, make), workers)
        assert [
            [a + b for a, b in zip(one, other, strict=True)] for (one, _), (other, _) in zip(first, second, strict=True)
        ] == [found for found, _ in whole]


@pytest.mark.parametrize(("rule", "workers", "stop"), pairwise(["sync", "asgd()"], [(1, 3), (3, 1), (4, 3)], [2, 7]))
def test_other_workers_go_on_where_these_stopped(
    rule: str, workers: tuple[int, int], stop: int, tmp_path: Path
) -> None:
    before, after = workers
    make: Callable[[], Any] = lambda: loader_of(sizes=[13] * 9)  # noqa: E731
    first = paceline.simulate(Program(rule, make, stop=stop, to=tmp_path / "c"), before)
    second = paceline.simulate(Program(rule, make, states=[state for _, state in first]), after)
    for epoch in range(2):
        assert sorted(flat(found[epoch] for found, _ in [*first, *second])) == everything([13] * 9)


@pytest.mark.processes
@pytest.mark.parametrize("rule", ["sync", "asgd()"])
def test_loader_processes_read_a_shard_each(rule: str) -> None:
    make: Callable[[], Any] = lambda: loader_of(sizes=[9, 5, 0, 17, 4, 8], num_workers=2)  # noqa: E731
    for workers in (1, 2):
        results = paceline.simulate(Program(rule, make), workers)
        for epoch in range(2):
            found = [worker[epoch] for worker, _ in results]
            assert sorted(flat(found)) == everything([9, 5, 0, 17, 4, 8])
    (found, _) = paceline.simulate(Program("sync", make, epochs=1), 1)[0]
    first, second = found[0][0], found[0][1]
    assert first[0] // 100 != second[0] // 100  # two shards are open at a time


def test_an_error_of_a_shard_comes_to_the_program(tmp_path: Path) -> None:
    class Broken(Counted):
        def read(self, shard: int, skip: int) -> Iterator[int]:
            for i in super().read(shard, skip):
                if i == 105:
                    raise OSError("shard 1 is damaged behind sample 4")
                yield i

    def program() -> list[int]:
        run = paceline.attach(model := nn.Linear(1, 1), torch.optim.SGD(model.parameters(), 0.1), "sync")
        shared = run.share(DataLoader(ShardStream(Broken(), shuffle=False), 2))
        found: list[int] = []
        with pytest.raises(OSError, match="damaged behind sample 4"):
            for batch in shared:
                found += batch.tolist()
        run.abandon()
        return found

    assert paceline.simulate(program, 1) == [[*range(7), 100, 101, 102, 103]]


def test_fewer_shards_than_workers_are_refused_where_shards_are_dealt() -> None:
    with pytest.raises(paceline.UnsupportedError, match="2 shards for 3 workers"):
        paceline.simulate(Program("sync", lambda: loader_of(sizes=[3, 3])), 3)
    results = paceline.simulate(Program("asgd()", lambda: loader_of(sizes=[3, 3])), 3)
    assert sorted(flat([found[1] for found, _ in results])) == everything([3, 3])


def test_other_shards_than_in_the_checkpoint_are_refused(tmp_path: Path) -> None:
    paceline.simulate(Program("sync", lambda: loader_of(), stop=2, to=tmp_path / "c"), 2)
    with pytest.raises(paceline.CheckpointError, match=r"9 shards.* has 8"):
        paceline.simulate(Program("sync", lambda: loader_of(sizes=SIZES[:8]), resume=tmp_path / "c"), 2)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_stream_works_in_a_loader_without_a_run(processes: int) -> None:
    torch.manual_seed(0)
    epochs = [flat([[batch.tolist() for batch in loader_of(num_workers=processes)]]) for _ in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == everything()
    assert epochs[0] != epochs[1]


def test_streams_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match=r"1 to .* shards, got 0"):
        ShardStream(Counted([]))
    with pytest.raises(ValueError, match="buffer must be"):
        ShardStream(Counted(), buffer=-1)
