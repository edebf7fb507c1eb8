# SPDX-License-Identifier: Apache-2.0
"""Batches from tickets: one each, in order, whatever happens to the processes that make them."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, get_worker_info

from paceline.core import rng
from paceline.data.workers.batching import BatchRequest, IpcBatch, OrderedBatches
from paceline.data.workers.loader import Loading

SEED = 5


class Squares(Dataset[Any]):
    """A dictionary for each sample, and who made it."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.full((3,), float(index) ** 2), "index": index, "pid": os.getpid()}


class Drawing(Dataset[Any]):
    """Draws from all three global generators; from two of them only for samples >= `late`."""

    def __init__(self, late: int = 0) -> None:
        self.late = late

    def __getitem__(self, index: int) -> Tensor:
        found = [torch.rand(()).item(), 0.0, 0.0, 0.0]
        if index >= self.late:
            found[1:] = [np.random.rand(), random.random(), random.gauss(0, 1)]
        return torch.tensor(found, dtype=torch.float64)


class Faulty(Dataset[Any]):
    """Something happens at one sample."""

    def __init__(self, bad: int, what: str = "error") -> None:
        self.bad, self.what = bad, what

    def __getitem__(self, index: int) -> Any:
        if index == self.bad:
            if self.what == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.what == "interrupt":
                os.kill(os.getppid(), signal.SIGINT)
                return index
            if self.what == "graph":
                return torch.ones(2, requires_grad=True) * 2
            raise KeyError(f"sample {index} is missing")
        return index


class Sized(Dataset[Any]):
    """Samples of 10 numbers, then, from `change` on, of so many that a batch of 4 has 2 MB; or the other way round."""

    def __init__(self, change: int, first: int = 10, then: int = 125_000) -> None:
        self.change, self.first, self.then = change, first, then

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((self.first if index < self.change else self.then,), float(index))


def requests(count: int, size: int = 4, epoch: int = 0, begin: int = 0) -> Iterator[BatchRequest]:
    """Consecutive samples."""
    return iter([BatchRequest(epoch, list(range(k, k + size))) for k in range(begin, begin + count * size, size)])


def loader(dataset: Any, **settings: Any) -> DataLoader[Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more processes than this machine has processors
        return DataLoader(dataset, 4, **settings)


def loading(dataset: Any, **settings: Any) -> Loading:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Loading(loader(dataset, **settings), SEED)


def keep(batch: list[Any]) -> list[Any]:
    """A collate_fn that collates nothing."""
    return batch


@pytest.fixture(autouse=True)
def _nobody_there() -> None:
    """Loader processes of an earlier test may still lie in a circle of references."""
    gc.collect()


def nobody_left() -> bool:
    """No child process lives; those that are asked to end get the time."""
    children = multiprocessing.active_children()
    for child in children:
        child.join(30)
    return not multiprocessing.active_children()


@pytest.mark.parametrize(("processes", "count"), [(0, 150), (1, 3), (1, 150), (2, 0), (2, 1), (2, 150)])
def test_one_batch_for_each_ticket_in_order(processes: int, count: int) -> None:
    ours = loading(Squares(), num_workers=processes)
    for epoch in range(2):
        batches = list(ours.batches(requests(count, epoch=epoch)))
        assert [b["index"].tolist() for b in batches] == [t.ids for t in requests(count)]
        assert all(b["x"].shape == (4, 3) and b["x"][1, 0] == b["index"][1] ** 2 for b in batches)
        makers = {int(pid) for b in batches for pid in b["pid"]}
        assert len(makers) == min(max(processes, 1), count) and (os.getpid() in makers) == (
            processes == 0 and count > 0
        )
    assert nobody_left()


@pytest.mark.processes
def test_messages_are_far_fewer_than_batches() -> None:
    batches = loading(Squares(), num_workers=1).batches(requests(400))
    assert isinstance(batches, OrderedBatches)
    came: list[int] = []
    receive = batches._blocks.came

    def count(ipc_batch: IpcBatch) -> int:
        came.append(len(ipc_batch))
        return receive(ipc_batch)

    batches._blocks.came = count  # type: ignore[method-assign]
    assert len(list(batches)) == 400
    assert sum(came) == 400 and came[:2] == [1, 1] and max(came) > 8


@pytest.mark.parametrize(("processes", "late"), [(1, 130), (2, 0), (2, 10**9)])
def test_draws_are_a_function_of_seed_epoch_and_sample(processes: int, late: int) -> None:
    ours = loading(Drawing(late), num_workers=processes)
    for epoch in range(2):
        for request, got in zip(requests(80, epoch=epoch), ours.batches(requests(80, epoch=epoch)), strict=True):
            for i, row in zip(request.ids, got, strict=True):
                with rng.seeded(rng.mix(SEED, epoch, zlib.crc32(repr(i).encode()))):
                    assert torch.equal(row, Drawing(late)[i])


@pytest.mark.parametrize("processes", [0, 2])
def test_an_error_comes_in_the_place_of_its_batch(processes: int) -> None:
    batches = loading(Faulty(bad=4 * 40 + 1), num_workers=processes).batches(requests(50))
    for k in range(40):
        assert next(batches).tolist() == list(range(4 * k, 4 * k + 4))
    with pytest.raises(KeyError, match="sample 161 is missing"):
        next(batches)
    assert [b[0].item() for b in batches] == list(range(164, 200, 4))  # as after an error of a bare DataLoader


@pytest.mark.processes
def test_a_batch_within_a_graph_of_gradients_is_an_error_and_not_a_hang() -> None:
    batches = loading(Faulty(bad=81, what="graph"), num_workers=1, collate_fn=keep).batches(requests(30))
    for _ in range(20):
        next(batches)
    with pytest.raises(RuntimeError, match=r"autograd.*detach\(\)"):
        next(batches)
    assert next(batches) == [84, 85, 86, 87]


@pytest.mark.parametrize("processes", [2])
def test_a_killed_process_is_reported(processes: int) -> None:
    batches = loading(Faulty(bad=200, what="kill"), num_workers=processes).batches(requests(100))
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        list(batches)
    del batches
    assert nobody_left()


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_a_pass_that_is_left_early_leaves_nothing_behind(persistent: bool) -> None:
    ours = loading(Squares(), num_workers=2, persistent_workers=persistent)
    gc.disable()  # which would hide a circle of references
    for stop in (0, 1, 30):
        for k, batch in enumerate(ours.batches(requests(200))):
            assert batch["index"].tolist() == list(range(4 * k, 4 * k + 4))
            if k == stop:
                break
    assert len(list(ours.batches(requests(10)))) == 10
    del ours
    gc.enable()
    assert nobody_left()


@pytest.mark.processes
def test_an_interrupt_leaves_nothing_behind() -> None:
    batches = loading(Faulty(bad=300, what="interrupt"), num_workers=2).batches(requests(100))
    interrupted = False
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background programs ignore
    gc.disable()  # an interrupt inside a callback of the garbage collector (jax has one) is printed and lost
    try:
        list(batches)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        gc.enable()
        signal.signal(signal.SIGINT, before)
    del batches
    assert interrupted and nobody_left()


@pytest.mark.processes
def test_tickets_are_drawn_when_they_are_needed() -> None:
    drawn = 0

    def source() -> Iterator[BatchRequest]:
        nonlocal drawn
        for request in requests(1000):
            drawn += 1
            yield request

    next(loading(Squares()).batches(source()))
    assert drawn == 1
    batches = loading(Squares(), num_workers=1, prefetch_factor=3).batches(source())
    next(batches)
    assert drawn == 1 + 3 + 1  # three blocks of one batch under way, and one more for the one that came


@pytest.mark.parametrize(("processes", "first", "then"), [(1, 125_000, 10), (2, 10, 125_000)])
def test_batches_whose_size_changes_suddenly_stay_in_order(processes: int, first: int, then: int) -> None:
    ours = loading(Sized(400, first, then), num_workers=processes)
    batches = ours.batches(requests(112))
    assert isinstance(batches, OrderedBatches)
    early = 0
    for k, batch in enumerate(batches):
        assert batch.shape == (4, first if k < 100 else then)
        assert batch[:, -1].tolist() == list(range(4 * k, 4 * k + 4))
        early = max(early, len(batches._early))
    assert k == 111 and early <= 2 * processes + 1


@pytest.mark.processes
def test_the_users_init_function_finds_the_users_dataset() -> None:
    def init(worker: int) -> None:
        info = get_worker_info()
        assert info is not None and info.id == worker
        info.dataset.bad = 1  # type: ignore[attr-defined]

    batches = loading(Faulty(bad=-1), num_workers=1, worker_init_fn=init).batches(requests(2))
    with pytest.raises(KeyError, match="sample 1 is missing"):
        next(batches)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
@pytest.mark.parametrize("processes", [0, 1])
def test_pinning_without_an_accelerator_warns_as_the_bare_loader_does(processes: int) -> None:
    ours = loading(Squares(), num_workers=processes, pin_memory=True)
    with pytest.warns(UserWarning, match="pin_memory"):
        batches = list(ours.batches(requests(5)))
    assert [b["index"].tolist() for b in batches] == [t.ids for t in requests(5)]
