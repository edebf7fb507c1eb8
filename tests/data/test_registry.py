# SPDX-License-Identifier: Apache-2.0
"""Data that a program makes anew for each epoch: what it has dropped is let go, and a resume still finds its place."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.data.sharing.loader_registry import NumberedData
from tests.helpers import simulate

EPOCHS = 12


def made(epoch: int, kind: str) -> tuple[Any, weakref.ref[Any]]:
    """The data of an epoch, and a reference to something in them that dies with them."""
    samples = torch.arange(16.0).reshape(8, 2) + 100 * epoch
    if kind == "list":
        batches = [part.clone() for part in samples.split(1)]
        return batches, weakref.ref(batches[0])
    if kind == "pairs":
        pairs = [(part.clone(), part.sum()) for part in samples.split(1)]
        return pairs, weakref.ref(pairs[0][0])
    data = TensorDataset(samples)
    return DataLoader(data, batch_size=1, shuffle=True), weakref.ref(data)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> None:
    inputs: Tensor = batch if isinstance(batch, Tensor) else batch[0]
    optimizer.zero_grad()
    model(inputs).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("rule", ["averaging", "asgd"])
@pytest.mark.parametrize("kind", ["list", "pairs", "loader"])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_the_program_has_dropped_is_let_go(rule: str, kind: str, workers: int) -> None:
    def program() -> list[int]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        alive, counts = [], []
        with paceline.attach(model, optimizer, rule) as run:
            for epoch in range(EPOCHS):
                data, reference = made(epoch, kind)
                alive.append(reference)
                for batch in run.share(data):
                    step(model, optimizer, batch)
                del data, batch
                counts.append(sum(one() is not None for one in alive))
        return counts

    for counts in simulate(program, workers):
        assert len(counts) == EPOCHS and max(counts) <= 3 and counts[-1] <= 2


def test_data_that_come_again_keep_their_number_and_their_epoch() -> None:
    """More of them than are remembered as loaders, kept by the program, and new ones in between."""

    def program() -> list[int]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        kept, found = [made(0, "list")[0] for _ in range(12)], []
        with paceline.attach(model, optimizer, "averaging") as run:
            for epoch in range(3):
                for data in kept:
                    shared = run.share(data)
                    found.append(shared.epoch == epoch)
                    for batch in shared:
                        step(model, optimizer, batch)
                for batch in run.share(made(epoch, "list")[0]):
                    step(model, optimizer, batch)
        return found

    assert all(all(found) for found in simulate(program, 2))


def test_a_resume_in_data_that_were_made_anew(tmp_path: Path) -> None:
    def program(resume: bool) -> list[list[float]]:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        found = []
        with paceline.attach(model, optimizer, "averaging", period=2) as run:
            if resume:
                run.resume(tmp_path / "saved")
            for epoch in range(4):
                data, _ = made(epoch, "list")
                shared, seen = run.share(data), []
                if resume and shared.epoch:
                    continue  # is done
                for number, batch in enumerate(shared):
                    step(model, optimizer, batch)
                    seen.append(float(batch[0, 0]))
                    if not resume and (epoch, number) == (2, 1):
                        run.save(tmp_path / "saved")
                found.append(seen)
        return found

    whole = simulate(lambda: program(False), 2)
    rest = simulate(lambda: program(True), 2)
    assert [[one[2][2:], one[3]] for one in whole] == rest


def test_numbers_are_those_of_the_order_in_which_data_come() -> None:
    registry, kept = NumberedData(), [[1], [2]]
    assert [registry.add(one) for one in kept] == [0, 1]
    for number in range(2, 50):  # whose addresses are soon those of others
        data = [number]
        assert registry.number(data) is None and registry.add(data) == number
        assert registry.number(data) == number
    assert [registry.number(one) for one in kept] == [0, 1]
    assert registry.live[:2] == [0, 1] and set(registry.live) <= {0, 1, 48, 49}
    assert len(registry.positions) == 50
