# SPDX-License-Identifier: Apache-2.0
"""`--random-data`: the program draws its samples itself, so each worker draws from generators of its own.

A seed that the program sets is a seed of rank 0; on another rank it is made of the two.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import torch

from paceline.randomness import mix
from paceline.zero.patches import Patches


def install(patches: Patches, rank: int) -> None:
    """Stand in for what sets seeds."""

    def apart(original: Callable[..., Any]) -> Callable[..., Any]:
        def seeds(seed: Any = None, *args: Any, **kwargs: Any) -> Any:
            own = mix(int(seed), rank) % 2**32 if isinstance(seed, int) else seed
            return original(own, *args, **kwargs)

        return seeds

    if rank:
        for owner, name in (
            (torch, "manual_seed"),
            (random, "seed"),
            (numpy.random, "seed"),
            (numpy.random, "default_rng"),
        ):
            patches.replace(owner, name, apart)
