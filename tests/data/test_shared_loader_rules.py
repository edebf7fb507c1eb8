# SPDX-License-Identifier: Apache-2.0
"""`run.share` under every family of rules, and in the loops that people write: every sample once an epoch."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset, TensorDataset

import paceline
from paceline.data import BucketBatches
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.data.sampling import sampler as drawing
from paceline.data.sampling.position import Position, ShardProgress
from paceline.errors import CheckpointError, UnsupportedError
from paceline.forecast.sim import Clock
from tests.data.test_shared_loader import SAMPLERS, Batches, Numbers, Reversed, Stream
from tests.tables import each_value_fast

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
    "iterable": lambda: list(torch.arange(31).split(2)),
    "IterableDataset": lambda: DataLoader(Stream(), 2),
    "one process": lambda: DataLoader(Numbers(31), 2, shuffle=True, num_workers=1),
    "none": lambda: DataLoader(Numbers(0), 2),
    "a batch larger than the data": lambda: DataLoader(Numbers(5), 64, shuffle=True),
    "batches of one": lambda: DataLoader(Numbers(7), 1),
}
ONE_PROCESS = pytest.param("one process", marks=pytest.mark.processes)
HERE = [name for name in FAMILIES if name != "one process"]
COUNTS = {"IterableDataset": 23, "none": 0, "batches of one": 7}
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


@pytest.mark.parametrize(("name", "workers", "rule"), each_value_fast(HERE, [1, 2, 3, 4], RULES)[: 2 * len(HERE)])
def test_every_sample_once_under_every_family_of_rules(name: str, workers: int, rule: str) -> None:
    def body(run: paceline.Run, step: Step) -> None:
        shared = run.share(FAMILIES[name]())
        for _ in range(2):
            for batch in shared:
                step(batch)

    n = COUNTS.get(name, 31)
    assert torch.equal(trained(body, workers, rule)[1], 2 * count_of(range(n)))


# -- whole batches --------------------------------------------------------------------------------

WHOLE: dict[str, Callable[[int, int], Iterable[Any]]] = {
    "shuffle": lambda n, b: DataLoader(Numbers(n), b, shuffle=True, drop_last=True),
    "sequential": lambda n, b: DataLoader(Numbers(n), b, drop_last=True),
    "sampler": lambda n, b: DataLoader(Numbers(n), b, sampler=Reversed(n), drop_last=True),
    "batch sampler": lambda n, b: DataLoader(Numbers(n), batch_sampler=BatchSampler(Reversed(n), b, True)),
    "own batches": lambda n, b: DataLoader(Numbers(n), batch_sampler=OwnBatches(Reversed(n), b, True)),
    "buckets": lambda n, b: DataLoader(Numbers(n), batch_sampler=BucketBatches([3] * n, batch_size=b, drop_last=True)),
    "IterableDataset": lambda n, b: DataLoader(Stream(n), b, drop_last=True),
    "drop_remainder": lambda n, b: Specified(n, b),
    "shards": lambda n, b: DataLoader(InTwoShards(n), b, shuffle=True, drop_last=True),
    "endless sampler": lambda n, b: DataLoader(Numbers(n), b, sampler=Reversed(n), drop_last=True),
}


class OwnBatches(BatchSampler):
    """A batch sampler of the user's, whose batches a place of its own stands for."""


class Specified:
    """Says the shapes of its batches as TensorFlow's data sets do, with `drop_remainder=True`."""

    def __init__(self, n: int, b: int) -> None:
        self.batches = torch.arange(n // b * b).split(b)
        self.element_spec = (SimpleNamespace(shape=(b,)), {"x": SimpleNamespace(shape=(b, 3))})

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class InTwoShards(Numbers):
    """Neighbours in its order lie in one file."""

    @property
    def shard_sizes(self) -> list[int]:
        return [self.n // 3, self.n - self.n // 3]


@pytest.mark.parametrize(
    ("name", "workers", "sizes", "rule"),
    each_value_fast(list(WHOLE), [2, 3, 4], [(33, 4), (39, 8), (24, 4), (7, 1), (38, 9)], RULES)[: 2 * len(WHOLE)],
)
def test_with_drop_last_every_batch_is_whole(
    name: str, workers: int, sizes: tuple[int, int], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one process drops it, and at most one batch a worker more, so that all make equally many steps."""
    n, b = sizes
    if name == "endless sampler":
        monkeypatch.setattr(drawing, "HELD", 2)
        monkeypatch.setattr(drawing, "LONGEST", 2)
        monkeypatch.setattr(drawing, "CHUNK", 2)

    leased = rule.startswith(("asgd", "easgd"))

    def body(run: paceline.Run, step: Step) -> list[list[int]]:
        shared, found = run.share(WHOLE[name](n, b)), []
        for _ in range(2):
            found.append([len(batch) for batch in shared if not step(batch)])
            assert name == "IterableDataset" or leased or len(found[-1]) == len(shared)
        return found

    if n // b < workers and not leased:
        with pytest.raises(UnsupportedError, match=f"drop_last asks for whole batches, and the loader has {n // b} "):
            trained(body, workers, rule)
        return
    found, total = trained(body, workers, rule)
    assert {size for worker in found for epoch in worker for size in epoch} == {b}
    batches = n // b if leased else n // b // workers * workers
    assert total.max() <= 2 and total.sum() == 2 * batches * b
    if not leased:
        assert len({len(epoch) for worker in found for epoch in worker}) == 1


@pytest.mark.parametrize("name", ["shuffle", "own batches", "shards"])
@pytest.mark.parametrize(("before", "workers"), [(3, 3), (3, 2), (2, 4)])
def test_with_drop_last_every_batch_is_whole_after_a_resume(
    name: str, before: int, workers: int, tmp_path: Path
) -> None:
    def body(resume: bool) -> Callable[..., list[int]]:
        def one(run: paceline.Run, step: Step) -> list[int]:
            shared, found = run.share(WHOLE[name](39, 4)), []
            if resume:
                run.resume(tmp_path / "c")
            for batch in shared:
                step(batch)
                found.append(len(batch))
                if not resume and run.minibatches == 2:
                    run.save(tmp_path / "c")
                    break
            return found

        return one

    first, done = trained(body(False), before, "averaging(period=1)")
    second, rest = trained(body(True), workers, "averaging(period=1)")
    assert {size for worker in (*first, *second) for size in worker} == {4}
    assert (done + rest).max() == 1 and rest.sum() == 4 * ((9 - 2 * before) // workers * workers)


def test_what_drop_last_leaves_out_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    def body(run: paceline.Run, step: Step) -> None:
        for batch in run.share(DataLoader(Numbers(33), 4, drop_last=True)):
            step(batch)

    trained(body, 3, "sync")
    assert caplog.text.count("each pass leaves out 2 whole batches that one worker would take") == 1
    caplog.clear()
    trained(body, 4, "sync")
    trained(body, 3, "asgd")
    assert "drop_last" not in caplog.text


def test_an_own_batch_sampler_is_told_where_its_batches_are_cut(caplog: pytest.LogCaptureFixture) -> None:
    def body(run: paceline.Run, step: Step) -> None:
        for batch in run.share(SAMPLERS["buckets"]()):
            step(batch)

    trained(body, 3, "sync")
    assert caplog.text.count("Buckets: the last 2 batches of a pass are cut into smaller ones") == 1
    caplog.clear()
    trained(body, 4, "sync")
    assert "are cut" not in caplog.text


CUT: dict[str, tuple[Callable[[int], Any], bool]] = {
    "tensor": (lambda k: torch.arange(k, k + 4), True),
    "pair": (lambda k: (torch.arange(k, k + 4), torch.zeros(4, 2)), True),
    "dictionary": (lambda k: {"x": torch.arange(k, k + 4), "name": list("abcd"), "split": "train", "t": 0.5}, True),
    "nested": (lambda k: [[torch.arange(k, k + 4), torch.zeros(4, 2)]], True),
    "time-major": (lambda k: (torch.arange(k, k + 4).repeat(6, 1), torch.zeros(4)), False),
    "pictures": (lambda k: ([torch.zeros(3, 5, 5)] * 4, [{"boxes": torch.zeros(j, 4)} for j in range(4)]), False),
    "graph": (lambda k: (torch.zeros(7, 2), torch.zeros(2, 9, dtype=torch.int64)), False),
}


@pytest.mark.parametrize("kind", list(CUT))
def test_a_batch_of_the_programs_is_cut_only_where_its_parts_agree(kind: str) -> None:
    """Three batches on two workers: the third is cut, or it is one worker's."""
    make, cut = CUT[kind]

    def body(run: paceline.Run, step: Step) -> list[list[tuple[int, ...]]]:
        def shapes(part: Any) -> list[tuple[int, ...]]:
            if isinstance(part, torch.Tensor):
                return [tuple(part.shape)]
            parts = part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ()
            return [shape for one in parts for shape in shapes(one)]

        shared = run.share([make(k) for k in (0, 4, 8)])
        found = [shapes(batch) for batch in shared]
        assert len(found) == len(shared)
        return found

    one, other = trained(body, 2, "sync")[0]
    whole = one[0]
    assert other[0] == whole and len(one) == 2 and len(other) == 1 + cut
    halves = [(2, *shape[1:]) for shape in whole]
    assert one[1] == (halves if cut else whole) and other[1:] == ([halves] if cut else [])


# -- who gets how many ----------------------------------------------------------------------------


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

    @pytest.mark.parametrize("anew", [False, True])
    def test_a_loop_within_a_loop_over_the_same_data(self, rule: str, anew: bool) -> None:
        """Where places are leased the outer loop cannot go on; it says so, and nothing is lost without a word."""
        data = Numbers(36)

        def body(run: paceline.Run, step: Step) -> None:
            loader = DataLoader(data, 2, shuffle=True)
            for number, batch in enumerate(run.share(loader)):
                step(batch)
                if number == 1:
                    for looked_at in run.share(DataLoader(data, 3) if anew else loader):
                        step(looked_at)

        if rule == "sync":
            assert torch.equal(trained(body, 3, rule)[1], 2 * count_of(range(36)))
            return
        with pytest.raises(UnsupportedError, match="another pass over the same data has begun within this one"):
            trained(body, 3, rule)

    def test_a_pass_that_nobody_goes_on_with(self, rule: str) -> None:
        """An iterator that is kept in a name does not keep what it leased."""

        def body(run: paceline.Run, step: Step) -> None:
            shared = run.share(DataLoader(Numbers(36), 2, shuffle=True))
            kept = iter(shared)
            step(next(kept))
            for batch in shared:
                step(batch)
            del kept

        _, total = trained(body, 3, rule)
        assert total[:36].min() == 1 and total.sum() == 36 + 6

    def test_a_loader_built_anew_every_epoch(self, rule: str) -> None:
        data = Numbers(30)

        def body(run: paceline.Run, step: Step) -> None:
            for _ in range(3):
                for batch in run.share(DataLoader(data, 4, shuffle=True)):
                    step(batch)

        assert torch.equal(trained(body, 3, rule)[1], 3 * count_of(range(30)))

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


# -- data that are not the same -------------------------------------------------------------------


class Indexed(Numbers):
    """Returns the number of the sample with it."""

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.zeros(2), "label": 3, "index": index} if self.n % 2 else (torch.zeros(2), 3, index)


@pytest.mark.parametrize("rule", ["sync", "asgd"])
@pytest.mark.parametrize("batch", [1, 4, 20])
@pytest.mark.parametrize("make", [Indexed, lambda n: Subset(Indexed(90), range(90 - n, 90))])
def test_sample_numbers_in_the_batches_are_reported(
    make: Callable[[int], Any], batch: int, rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    def body(data: Any) -> Callable[..., None]:
        def one(run: paceline.Run, step: Step) -> None:
            for _ in range(2):
                for _ in run.share(DataLoader(data, batch, shuffle=True)):
                    step(torch.zeros(1, dtype=torch.int64))

        return one

    for n in (40, 41):
        caplog.clear()
        trained(body(make(n)), 2, rule)
        assert caplog.text.count("the batches hold the numbers of their samples") == 1
    caplog.clear()
    trained(body(TensorDataset(torch.zeros(40), torch.arange(40) % 7)), 2, rule)
    trained(body(Numbers(40)), 2, rule)
    trained(body(make(40)), 1, rule)
    assert "numbers of their samples" not in caplog.text


@pytest.mark.parametrize("rule", ["sync", "asgd"])
@pytest.mark.parametrize("name", ["shuffle", "sequential"])
@pytest.mark.parametrize("n", [30, 42])
def test_data_that_are_longer_or_shorter_than_at_the_checkpoint(rule: str, name: str, n: int, tmp_path: Path) -> None:
    def body(n: int, resume: bool) -> Callable[..., None]:
        def one(run: paceline.Run, step: Step) -> None:
            if resume:
                run.resume(tmp_path / "c")
            for number, batch in enumerate(run.share(DataLoader(Numbers(n), 2, shuffle=name == "shuffle"))):
                step(batch)
                if not resume and number == 1:
                    run.save(tmp_path / "c")

        return one

    trained(body(36, False), 2, rule)
    with pytest.raises(CheckpointError, match=f"an epoch of 36 samples or more, and the loader has {n}"):
        trained(body(n, True), 2, rule)


# -- resume ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["asgd", "easgd(period=3)", "averaging(period=3)"])
@pytest.mark.parametrize("name", ["shuffle", "batch sampler", "iterable", "IterableDataset", ONE_PROCESS])
@pytest.mark.parametrize("even", [False, True])
def test_the_same_batches_and_bits_go_on(rule: str, name: str, even: bool, tmp_path: Path) -> None:
    """Stopped after each worker's third step, which is later for slow ones, and resumed."""
    if name == "one process" and not even and not rule.startswith("averaging"):
        pytest.skip("how far a loader process works ahead, and so what it leases, is a matter of real time")

    def program(resume: bool, stop: bool) -> Callable[[], Any]:
        def one() -> Any:
            torch.manual_seed(0)
            model = nn.Embedding(40, 1)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            run = paceline.attach(model, optimizer, rule, seed=1)
            shared, seen = run.share(FAMILIES[name](), even), []
            if resume:
                run.resume(tmp_path / "c")
            for _ in range(run.epoch, 3):
                for batch in shared:
                    optimizer.zero_grad()
                    model(torch.as_tensor(batch).view(-1)).square().sum().backward()
                    optimizer.step()
                    seen.append(torch.as_tensor(batch).view(-1).tolist())
                    if not resume and run.minibatches == 3:
                        run.save(tmp_path / "c")
                        if stop:
                            run.abandon()
                            return seen, None
            run.close()
            return seen, model.weight.detach().clone()

        return one

    whole = paceline.simulate(program(False, False), 3, clock=UNEVEN)
    first = paceline.simulate(program(False, True), 3, clock=UNEVEN)
    second = paceline.simulate(program(True, False), 3, clock=UNEVEN)
    assert [a[0] + b[0] for a, b in zip(first, second, strict=True)] == [seen for seen, _ in whole]
    assert all(torch.equal(a[1], b[1]) for a, b in zip(whole, second, strict=True))


class Huge(Numbers):
    """Counts how often it is asked."""

    asked = 0

    def __getitem__(self, index: int) -> int:
        Huge.asked += 1
        return super().__getitem__(index) % 40


@pytest.mark.parametrize("rule", ["sync", "asgd"])
def test_a_thousand_million_samples_are_resumed_in_mid_epoch_without_going_through_them(rule: str) -> None:
    """Worker 2 of 4, behind a hundred million steps: a few samples are asked for, and nothing is listed."""
    n, steps = 10**9, 10**7

    def body(run: paceline.Run, step: Step) -> tuple[int, int]:
        shared = run.share(DataLoader(Huge(n), 16, shuffle=True))
        state = run._state.capture()["data"]
        if rule == "sync":
            position = {
                **Position().state(),
                "passes": [[0, ["rounds", n, 16, 4], steps, steps, ShardProgress().state()]],
            }
        else:
            ledger = Ledger()
            ledger.epochs.expect(0, 0, Ranges([(64 * steps, n)]))
            state["ledger"] = ledger.state() if state["ledger"] is not None else None
            position = Position().state()
        tracemalloc.start()
        run._context.loaders.load({**state, "positions": [position]})
        run._transport.barrier()
        batches = iter(shared)
        step(next(batches))
        batches.close()  # type: ignore[attr-defined]
        return tracemalloc.get_traced_memory()[1], shared.epoch

    Huge.asked = 0
    try:
        found, _ = trained(body, 4, rule)
    finally:
        tracemalloc.stop()
    assert Huge.asked == 64
    # A list of one worker's steps takes more; what is imported on the way takes a part of this.
    assert all(peak < 80_000_000 and epoch == 0 for peak, epoch in found), found


# -- what a run keeps -----------------------------------------------------------------------------


def test_an_even_split_leaves_no_marks() -> None:
    def body(run: paceline.Run, step: Step) -> list[Any]:
        for batch in run.share(DataLoader(Numbers(31), 2, shuffle=True), even=True):
            step(batch)
        return [run._context.loaders.state()["in_hand"], run._context.loaders.holding()]

    for rule in ("sync", "asgd"):
        assert trained(body, 2, rule)[0] == [[[], []]] * 2


def test_loaders_that_are_built_anew_are_let_go() -> None:
    def body(run: paceline.Run, step: Step) -> int:
        data, loaders = Numbers(4), []
        for _ in range(30):
            loader = DataLoader(data, 2)
            loaders.append(weakref.ref(loader))
            for batch in run.share(loader):
                step(batch)
        del loader, batch
        gc.collect()
        return sum(one() is not None for one in loaders)

    assert trained(body, 2, "sync")[0] == [8, 8]


# -- streams that every worker reads as a whole ---------------------------------------------------


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=3)"])
@pytest.mark.parametrize("seeded", [False, True])
def test_a_stream_whose_order_differs_by_worker_is_named(
    rule: str, seeded: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def worker() -> None:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        with paceline.attach(model, optimizer, rule) as run:
            seed = 5 if seeded else run.world.rank
            order = torch.randperm(24, generator=torch.Generator().manual_seed(seed))
            for _ in range(2):
                for batch in run.share(DataLoader(Fixed(order), 2)):
                    optimizer.zero_grad()
                    model(batch[:, None].float()).square().mean().backward()
                    optimizer.step()

    paceline.simulate(worker, 2)
    said = [one.getMessage() for one in caplog.records if "samples come twice or never" in one.getMessage()]
    assert len(said) == (0 if seeded else 1), said


class Fixed(torch.utils.data.IterableDataset[int]):
    """Samples in a given order."""

    def __init__(self, order: torch.Tensor) -> None:
        self.order = order

    def __iter__(self) -> Iterator[int]:
        return iter(self.order.tolist())
