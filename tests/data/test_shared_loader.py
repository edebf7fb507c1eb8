# SPDX-License-Identifier: Apache-2.0
"""`run.share`: law 11, every sample of an epoch exactly once, with the loaders that people have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, Sampler, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler

import paceline
from tests.helpers import simulate
from tests.tables import each_value_fast

Batches = list[list[int]]


class Numbers(torch.utils.data.Dataset[int]):
    """0 .. n."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.n:
            raise IndexError(index)
        return index


class Reversed(Sampler[int]):
    """A sampler of the user's own, with a generator that it does not show."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(reversed(torch.randperm(self.n).tolist()))

    def __len__(self) -> int:
        return self.n


class Stream(IterableDataset[int]):
    def __init__(self, n: int = 23) -> None:
        self.n = n

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.n))


class SizedStream(Stream):
    def __len__(self) -> int:
        return self.n


def attached(seed: int = 0) -> paceline.Run:
    model = nn.Linear(1, 1)
    return paceline.attach(model, torch.optim.SGD(model.parameters(), 0.1), "averaging", seed=seed)


def passes(make: Callable[[], Iterable[Any]], workers: int, epochs: int = 2, seed: int = 0) -> list[list[Batches]]:
    """What every worker sees in every epoch: found[worker][epoch] = batches."""

    def program() -> list[Batches]:
        run = attached(seed)
        shared = run.share(make())
        found = []
        for _ in range(epochs):
            expected = None if type(getattr(shared.loader, "dataset", None)) is Stream else len(shared)
            batches = [torch.as_tensor(batch).view(-1).tolist() for batch in shared]
            assert expected is None or len(batches) == expected
            found.append(batches)
        run.close()
        return found

    return simulate(program, workers)


def flat(found: list[list[Batches]], epoch: int) -> list[int]:
    return [i for worker in found for batch in worker[epoch] for i in batch]


@pytest.mark.parametrize(
    ("workers", "sizes", "shuffle"),
    each_value_fast([2, 3, 4], [(48, 4), (50, 4), (13, 4), (5, 2), (3, 4), (7, 1), (33, 16)], [False, True]),
)
def test_every_sample_once(workers: int, sizes: tuple[int, int], shuffle: bool) -> None:
    n, batch = sizes
    found = passes(lambda: DataLoader(Numbers(n), batch, shuffle=shuffle), workers)
    for epoch in range(2):
        assert sorted(flat(found, epoch)) == list(range(n))
    assert all(len(b) <= batch for worker in found for e in worker for b in e)
    if shuffle and n > 10:
        assert flat(found, 0) != flat(found, 1)  # shuffled anew
    if not shuffle:
        assert flat(found, 0) == flat(found, 1)


def test_without_shuffling_the_rounds_are_in_order() -> None:
    found = passes(lambda: DataLoader(Numbers(12), 2), 3)
    assert [worker[0] for worker in found] == [[[0, 1], [6, 7]], [[2, 3], [8, 9]], [[4, 5], [10, 11]]]


SAMPLERS: dict[str, Callable[[], DataLoader[int]]] = {
    "random": lambda: DataLoader(Numbers(31), 4, sampler=RandomSampler(Numbers(31))),
    "own": lambda: DataLoader(Numbers(31), 4, sampler=Reversed(31)),
    "generator": lambda: DataLoader(Numbers(31), 4, shuffle=True, generator=torch.Generator()),
    "subset": lambda: DataLoader(Numbers(90), 4, sampler=SubsetRandomSampler(range(31))),
    "batch_sampler": lambda: DataLoader(Numbers(31), batch_sampler=BatchSampler(Reversed(31), 4, False)),
    "buckets": lambda: DataLoader(Numbers(31), batch_sampler=Buckets()),
    "distributed": lambda: DataLoader(Numbers(31), 4, sampler=DistributedSampler(Numbers(31), 4, 1)),
    "list": lambda: torch.arange(31).split(4),  # type: ignore[dict-item,return-value]
    "stream": lambda: DataLoader(Stream(), 4),
    "sized stream": lambda: DataLoader(SizedStream(), 4),
    "sized stream of ones": lambda: DataLoader(SizedStream(), 1),
    "batches of one": lambda: DataLoader(Numbers(31), 1, shuffle=True),
    "lists of ones": lambda: torch.arange(31).split(1),  # type: ignore[dict-item,return-value]
}


class Buckets(Sampler[list[int]]):
    """Batches of unequal size, in an order of its own."""

    def __iter__(self) -> Iterator[list[int]]:
        parts = [list(p) for p in torch.arange(31).split([5, 1, 7, 2, 6, 4, 3, 3])]
        for k in torch.randperm(len(parts)).tolist():
            yield [int(i) for i in parts[k]]

    def __len__(self) -> int:
        return 8


def test_the_union_does_not_depend_on_n_in_full_rounds() -> None:
    make: Callable[[], Any] = lambda: DataLoader(Numbers(48), 2, shuffle=True)  # noqa: E731
    two, four = passes(make, 2), passes(make, 4)

    def rounds(found: list[list[Batches]]) -> list[int]:
        return [i for step in zip(*(worker[0] for worker in found), strict=True) for batch in step for i in batch]

    assert rounds(two) == rounds(four)


def test_one_worker_gets_the_users_own_loader() -> None:
    torch.manual_seed(3)
    want = [[b.tolist() for b in DataLoader(Numbers(31), 4, shuffle=True)] for _ in range(1)]
    run = attached()
    torch.manual_seed(3)
    assert [b.tolist() for b in run.share(DataLoader(Numbers(31), 4, shuffle=True))] == want[0]
    run.close()


def test_what_the_script_asks_of_its_loader_is_still_there() -> None:
    def program() -> list[Any]:
        run = attached()
        data = Numbers(10)
        shared = run.share(DataLoader(data, 4))
        found = [shared.dataset is data, shared.batch_size, len(shared)]
        run.close()
        return found

    assert simulate(program, 2) == [[True, 4, 2]] * 2
    with pytest.raises(AttributeError):
        _ = attached().share([1, 2]).nonsense


def test_dictionaries_tuples_and_scalars_in_the_last_round() -> None:
    batches = [{"x": torch.arange(k, k + 4), "name": list("abcd"), "scale": torch.tensor(2.0)} for k in (0, 4, 8)]

    def program() -> list[tuple[list[int], list[str]]]:
        run = attached()
        found = [(b["x"].tolist(), b["name"]) for b in run.share(batches)]
        run.close()
        return found

    one, other = simulate(program, 2)
    assert one == [([0, 1, 2, 3], list("abcd")), ([8, 9], ["a", "b"])]
    assert other == [([4, 5, 6, 7], list("abcd")), ([10, 11], ["c", "d"])]


@pytest.mark.claim
@pytest.mark.processes
def test_worker_processes_see_every_sample_once() -> None:
    found = passes(lambda: DataLoader(Numbers(21), 4, shuffle=True, num_workers=1), 2, epochs=2)
    for epoch in range(2):
        assert sorted(flat(found, epoch)) == list(range(21))


@pytest.mark.parametrize("name", ["random", "own", "buckets", "list", "stream"])
@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_a_resumed_pass_goes_on_behind_the_last_batch(name: str, at: int, tmp_path: Path) -> None:
    def program(resume: bool, stop: int | None) -> Callable[[], list[list[int]]]:
        def body() -> list[list[int]]:
            run = attached()
            if resume:
                run.resume(tmp_path / "c")
            shared = run.share(SAMPLERS[name]())
            seen: list[list[int]] = []
            for _ in range(run.epoch, 2):
                for batch in shared:
                    seen.append(torch.as_tensor(batch).tolist())
                    if len(seen) == stop:
                        run.save(tmp_path / "c")
                        run.abandon()
                        return seen
            run.close()
            return seen

        return body

    whole = simulate(program(False, None), 2)
    first = simulate(program(False, at), 2)
    second = simulate(program(True, None), 2)
    assert [a + b for a, b in zip(first, second, strict=True)] == whole
