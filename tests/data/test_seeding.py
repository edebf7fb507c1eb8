# SPDX-License-Identifier: Apache-2.0
"""Seeds of samples: set where a sample draws, watched where none did."""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch

from paceline.core import rng
from paceline.data.workers.loader import PROBED_BLOCKS, Seeds

DRAWS: dict[str, Callable[[], object]] = {
    "numpy": np.random.rand,
    "numpy's second normal": lambda: np.random.standard_normal(1),
    "python": random.random,
    "python's gauss": lambda: random.gauss(0, 1),
}


@pytest.fixture(autouse=True)
def _generators_are_put_back() -> object:
    with rng.seeded(1):
        yield


def block(seeds: Seeds, draw: Callable[[], object]) -> bool:
    """Two samples that draw; whether the block must be repeated."""
    seeds.begin_block()
    for index in range(2):
        seeds.sow(3, index)
        draw()
    return seeds.must_repeat()


def expected(index: int, draw: Callable[[], object]) -> object:
    with rng.seeded(rng.mix(7, 3, zlib.crc32(repr(index).encode()))):
        return draw()


@pytest.mark.parametrize("name", DRAWS)
def test_a_block_that_draws_after_others_did_not_is_repeated(name: str) -> None:
    seeds = Seeds(7)
    for _ in range(PROBED_BLOCKS + 3):
        assert not block(seeds, lambda: None)
    assert block(seeds, DRAWS[name])
    assert not block(seeds, DRAWS[name])  # seeded from now on
    seeds.sow(3, 11)
    assert DRAWS[name]() == expected(11, DRAWS[name])


@pytest.mark.parametrize("name", DRAWS)
def test_who_draws_from_the_start_is_never_repeated(name: str) -> None:
    seeds = Seeds(7)
    for _ in range(PROBED_BLOCKS + 3):
        assert not block(seeds, DRAWS[name])
        seeds.sow(3, 5)
        assert DRAWS[name]() == expected(5, DRAWS[name])


def test_torch_is_always_seeded() -> None:
    seeds = Seeds(7)
    for _ in range(PROBED_BLOCKS + 3):
        assert not block(seeds, lambda: torch.rand(3))
    seeds.begin_block()
    seeds.sow(3, 4)
    assert torch.initial_seed() == rng.mix(7, 3, zlib.crc32(b"4"))
    assert torch.rand(()).item() == expected(4, lambda: torch.rand(()).item())
