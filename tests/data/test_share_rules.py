# SPDX-License-Identifier: Apache-2.0
"""`run.share` under every family of rules, and in the loops that people write: every sample once an epoch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler

import paceline
from paceline.errors import UnsupportedError
from paceline.sim import Clock
from tests.data.test_share import SAMPLERS, Batches, Numbers, Stream

# -- under every family of rules ------------------------------------------------------------------

RULES = ["sync", "averaging(period=3)", "bmuf(period=3)", "asgd", "easgd(period=3)"]
UNEVEN = Clock(compute=[1.0, 0.5, 0.33, 0.2])


class Weighted(Sampler[int]):
    """Every sample once, heavy ones earlier: a draw without replacement."""

    def __iter__(self) -> Iterator[int]:
        weights = torch.arange(1.0, 32.0)
        yield from torch.multinomial(weights, 31, replacement=False).tolist()

    def __len__(self) -> int:
        return 31


FAMILIES: dict[str, Callable[[], Iterable[Any]]] = {
    "shuffle": lambda: DataLoader(Numbers(31), 2, shuffle=True),
    "sequential": lambda: DataLoader(Numbers(31), 2),
    "sampler": SAMPLERS["own"],
    "weighted": lambda: DataLoader(Numbers(31), 2, sampler=Weighted()),
    "batch sampler": SAMPLERS["buckets"],
    "drop_last": lambda: DataLoader(Numbers(33), 4, drop_last=True),
    "iterable": lambda: list(torch.arange(31).split(2)),
    "IterableDataset": lambda: DataLoader(Stream(), 2),
    "one process": lambda: DataLoader(Numbers(31), 2, shuffle=True, num_workers=1),
    "fewer than workers": lambda: DataLoader(Numbers(2), 1, shuffle=True),
    "none": lambda: DataLoader(Numbers(0), 2),
    "a batch larger than the data": lambda: DataLoader(Numbers(5), 64, shuffle=True),
    "batches of one": lambda: DataLoader(Numbers(7), 1),
}
COUNTS = {"drop_last": 32, "IterableDataset": 23, "fewer than workers": 2, "none": 0, "batches of one": 7}
COUNTS["a batch larger than the data"] = 5


Step = Callable[[Any], None]


def trained(
    body: Callable[[paceline.Run, Step], Any], workers: int, rule: str = "asgd", clock: Clock = UNEVEN
) -> tuple[list[Any], torch.Tensor]:
    """(what `body(run, step)` gives on every worker, how often each sample went through a step).

    Under asgd the model itself counts, and has to say the same: its loss is the sum of the parameters of the samples.
    """

    def program() -> tuple[Any, list[int], torch.Tensor]:
        model, samples = nn.Embedding(40, 1), []
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        run = paceline.attach(model, optimizer, rule, seed=0)

        def step(batch: Any) -> None:
            ids = torch.as_tensor(batch).view(-1)
            optimizer.zero_grad()
            model(ids).sum().backward()
            optimizer.step()
            samples.extend(ids.tolist())

        found = body(run, step)
        run.close()
        return found, samples, -model.weight.detach().view(-1)

    rows = list(paceline.simulate(program, workers, clock=clock))
    total = count_of(i for _, samples, _ in rows for i in samples)
    if rule == "asgd":
        assert all(torch.equal(model, total) for _, _, model in rows)
    return [found for found, _, _ in rows], total


def count_of(samples: Iterable[int]) -> torch.Tensor:
    """How often each sample is there."""
    return torch.bincount(torch.tensor(list(samples), dtype=torch.int64), minlength=40).float()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", RULES)
def test_every_sample_once_under_every_family_of_rules(name: str, workers: int, rule: str) -> None:
    def body(run: paceline.Run, step: Step) -> None:
        shared = run.share(FAMILIES[name]())
        for _ in range(2):
            for batch in shared:
                step(batch)

    n = COUNTS.get(name, 31)
    assert torch.equal(trained(body, workers, rule)[1], 2 * count_of(range(n)))


def test_a_fast_worker_gets_more_and_with_even_the_same() -> None:
    def body(even: bool) -> Callable[..., list[int]]:
        def one(run: paceline.Run, step: Step) -> list[int]:
            shared, steps = run.share(DataLoader(Numbers(40), 1, shuffle=True), even=even), []
            for _ in range(3):
                steps.append(0)
                for batch in shared:
                    steps[-1] += 1
                    step(batch)
            return steps

        return one

    steps, total = trained(body(False), 4)
    sums = [sum(own) for own in steps]
    assert sums == sorted(sums) and sums[3] > 3 * sums[0]
    assert torch.equal(total, 3 * count_of(range(40)))
    assert trained(body(True), 4)[0] == [[10, 10, 10]] * 4


@pytest.mark.parametrize("rule", ["sync", "asgd"])
class TestLoops:
    """What people do with loops."""

    def test_two_loaders_in_turn(self, rule: str) -> None:
        def body(run: paceline.Run, step: Step) -> None:
            one = run.share(DataLoader(Numbers(20), 2, shuffle=True))
            other = run.share(DataLoader(Numbers(31), 4, shuffle=True))
            for _ in range(2):
                for shared in (one, other):
                    for batch in shared:
                        step(batch)

        assert torch.equal(trained(body, 3, rule)[1], 2 * (count_of(range(20)) + count_of(range(31))))

    def test_a_loop_within_a_loop(self, rule: str) -> None:
        """An evaluation over other data in the middle of an epoch."""

        def body(run: paceline.Run, step: Step) -> list[int]:
            outer = run.share(DataLoader(Numbers(24), 2, shuffle=True))
            inner = run.share(DataLoader(Numbers(9), 2), even=True)
            seen = []
            for batch in outer:
                step(batch)
                if not seen:
                    seen = [int(i) for looked_at in inner for i in looked_at]
            return seen

        found, total = trained(body, 3, rule)
        assert sorted(i for seen in found for i in seen) == list(range(9))
        assert torch.equal(total, count_of(range(24)))

    def test_a_loader_built_anew_every_epoch(self, rule: str) -> None:
        data = Numbers(30)

        def body(run: paceline.Run, step: Step) -> None:
            for _ in range(3):
                for batch in run.share(DataLoader(data, 4, shuffle=True)):
                    step(batch)

        assert torch.equal(trained(body, 3, rule)[1], 3 * count_of(range(30)))

    def test_a_loader_shared_twice_is_one(self, rule: str) -> None:
        def body(run: paceline.Run, step: Step) -> bool:
            loader = DataLoader(Numbers(30), 4, shuffle=True)
            for batch in run.share(loader):
                step(batch)
            return run.share(loader) is run.share(loader) and run.epoch == 1

        found, total = trained(body, 3, rule)
        assert all(found) and torch.equal(total, count_of(range(30)))

    def test_set_epoch(self, rule: str) -> None:
        def body(run: paceline.Run, step: Step) -> int:
            shared = run.share(DataLoader(Numbers(24), 4, shuffle=True))
            for epoch in (0, 3, 7):
                shared.set_epoch(epoch)
                for batch in shared:
                    step(batch)
            return shared.epoch

        found, total = trained(body, 2, rule)
        assert torch.equal(total, 3 * count_of(range(24))) and found == [8, 8]

    def test_set_epoch_to_one_that_was(self, rule: str) -> None:
        """As programs do that show the same order again, of folds for instance."""

        def body(run: paceline.Run, step: Step) -> None:
            shared = run.share(DataLoader(Numbers(24), 4, shuffle=True))
            for epoch in (0, 1, 0):
                shared.set_epoch(epoch)
                for batch in shared:
                    step(batch)

        if rule == "sync":
            assert torch.equal(trained(body, 2, rule)[1], 3 * count_of(range(24)))
            return
        with pytest.raises(UnsupportedError, match=r"set_epoch\(0\) goes back from epoch 2"):
            trained(body, 2, rule)

    def test_a_loop_that_is_left_early(self, rule: str) -> None:
        """No sample twice in an epoch, and the next epoch is whole."""

        def body(run: paceline.Run, step: Step) -> list[Batches]:
            shared, seen = run.share(DataLoader(Numbers(36), 2, shuffle=True)), []
            for epoch in range(3):
                seen.append([])
                for number, batch in enumerate(shared):
                    step(batch)
                    seen[-1].append(batch.tolist())
                    if epoch < 2 and number == 1:
                        break
            return seen

        found, _ = trained(body, 3, rule)
        for epoch in range(3):
            samples = [i for seen in found for batch in seen[epoch] for i in batch]
            assert len(samples) == len(set(samples)) and len(samples) == (36 if epoch == 2 else 12)

    def test_an_error_in_the_loop_that_the_program_survives(self, rule: str) -> None:
        def body(run: paceline.Run, step: Step) -> None:
            shared = run.share(DataLoader(Numbers(36), 2, shuffle=True))
            with contextlib.suppress(KeyError):
                for number, batch in enumerate(shared):
                    step(batch)
                    if number == 1:
                        raise KeyError("the user's")
            for batch in shared:
                step(batch)

        _, total = trained(body, 2, rule)
        assert total[:36].min() == 1 and total.sum() == 36 + 8

    def test_an_error_of_the_dataset_is_the_users(self, rule: str) -> None:
        def body(run: paceline.Run, step: Step) -> None:
            for batch in run.share(DataLoader(Broken(24), 2)):
                step(batch)

        with pytest.raises(OSError, match="sample 13 cannot be read"):
            trained(body, 2, rule)


class Broken(Numbers):
    def __getitem__(self, index: int) -> int:
        if index == 13:
            raise OSError("sample 13 cannot be read")
        return super().__getitem__(index)
