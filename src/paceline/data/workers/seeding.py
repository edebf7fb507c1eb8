# SPDX-License-Identifier: Apache-2.0
"""Randomness in loader processes that is a function of (seed, epoch, sample) alone.

So an augmentation depends neither on the process or worker that makes it, nor on where a run was resumed. The three
global generators (torch, NumPy, Python) are seeded before every sample.

Seeding the last two takes longer than fetching and sending a sample of 1 KB, and most datasets draw from neither. So
if the first blocks drew nothing from them, they are not seeded, and their state is compared after each block. The first
block that does draw is made again, seeded, and from then on every sample is. The result is the same as if every sample
were seeded, unless a sample reads the state of NumPy's or Python's global generator without drawing from it.
"""

from __future__ import annotations

import random
import zlib
from typing import Any

import numpy as np
import torch

from paceline.core import rng

PROBED_BLOCKS = 4


class Seeds:
    """Seeds the samples that one process makes; `seed` is the run's."""

    def __init__(self, seed: int) -> None:
        self._seed, self._last = seed, 0
        self._probes = PROBED_BLOCKS
        self._watching = False
        self._before: tuple[Any, ...] = ()

    def begin_block(self) -> None:
        if self._watching:
            self._before = _state()

    def sow(self, epoch: int, what: Any) -> None:
        """Seed the next sample, fetched by the index `what`, or the next batch, fetched by a list of them."""
        self._last = number = rng.mix(self._seed, epoch, zlib.crc32(repr(what).encode()))
        if self._watching:
            torch.default_generator.manual_seed(number)
        else:
            rng.seed_all(number)

    def must_repeat(self) -> bool:
        """Whether the block drew from a generator without a seed; then every later sample is seeded."""
        if self._watching:
            self._watching = _state() == self._before
            return not self._watching
        if self._probes:
            self._probe()
        return False

    def _probe(self) -> None:
        """Only watch, once several blocks drew nothing after their last seed."""
        now = _state()
        rng.seed_all(self._last)
        untouched = _state() == now
        self._probes = self._probes - 1 if untouched else 0
        self._watching = untouched and self._probes == 0


def _state() -> tuple[Any, ...]:
    """The states of NumPy's and Python's global generators."""
    kind, keys, *rest = np.random.get_state()
    return (kind, np.asarray(keys).tobytes(), *rest, random.getstate())
