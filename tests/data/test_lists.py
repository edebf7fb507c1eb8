# SPDX-License-Identifier: Apache-2.0
"""A plain list: every item on one worker, in the order of the list, and nobody touches what is not his."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.forecast.sim import Clock

NAMES = [f"{k:02d}.wav" for k in range(11)]


class Watched(Sequence[str]):
    """Tells which items were asked for."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return len(NAMES)

    def __getitem__(self, index: Any) -> Any:
        if index >= len(NAMES):
            raise IndexError(index)
        self.asked.append(index)
        return NAMES[index]


def program(
    rule: str,
    make: Callable[[], Any],
    epochs: int = 2,
    stop: int | None = None,
    to: Path = Path(),
    resume: Path | None = None,
) -> Callable[[], tuple[list[list[Any]], int]]:
    """found[epoch] = items, and the samples that were counted; one step for each."""

    def body() -> tuple[list[list[Any]], int]:
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        run = paceline.attach(model, optimizer, rule)
        if resume is not None:
            run.resume(resume)
        shared = run.share(make())
        found: list[list[Any]] = [[] for _ in range(epochs)]
        for epoch in range(run.epoch, epochs):
            expected = len(shared)
            for item in shared:
                found[epoch].append(item)
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                if sum(map(len, found)) == stop:
                    run.save(to)
                    run.abandon()
                    return found, run.samples
            assert rule == "asgd()" or resume is not None or len(found[epoch]) == expected
        run.close()
        return found, run.samples

    return body


RULES = ["sync", "bmuf(period=2)", "asgd()"]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [str, Path])
def test_every_path_once_an_epoch(rule: str, workers: int, kind: Any) -> None:
    names = [kind(name) for name in NAMES]
    results = paceline.simulate(program(rule, lambda: names), workers, clock=Clock([1.0, 0.3, 0.6, 2.1]))
    for epoch in range(2):
        assert sorted(item for found, _ in results for item in found[epoch]) == names
        assert all(found[epoch] == sorted(found[epoch]) for found, _ in results)  # as the list has them
    assert sum(samples for _, samples in results) == 2 * len(names)


def test_items_are_dealt_in_turn() -> None:
    results = paceline.simulate(program("sync", lambda: NAMES, epochs=1), 4)
    assert [found[0] for found, _ in results] == [NAMES[rank::4] for rank in range(4)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resumed_pass_touches_only_what_is_left(rule: str, workers: int, tmp_path: Path) -> None:
    first = paceline.simulate(program(rule, lambda: NAMES, stop=3, to=tmp_path / "c"), workers)
    lists: list[Watched] = []

    def make() -> Watched:
        lists.append(Watched())
        return lists[-1]

    second = paceline.simulate(program(rule, make, epochs=1, resume=tmp_path / "c"), workers)
    seen = [item for found, _ in first for item in found[0]]
    again = [item for found, _ in second for item in found[0]]
    assert sorted(seen + again) == NAMES and len(seen) == 3 * workers
    looked_at = {k for own in lists for k in own.asked} - {0}  # the first tells of what kind they are
    assert looked_at == {NAMES.index(item) for item in again} - {0}


def test_a_name_is_no_list() -> None:
    with pytest.raises(paceline.UnsupportedError, match="one name and no list"):
        paceline.simulate(program("sync", lambda: "a.wav"), 1)
