# SPDX-License-Identifier: Apache-2.0
"""The global random generators of torch, NumPy and Python: captured, restored and seeded together."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """The state of every global generator, as tensors, numbers and lists for a checkpoint."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    version, words, next_gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, gauss],
        "python": [version, torch.tensor(words, dtype=torch.int64), next_gauss],
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state()  # of the device that this worker uses
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore a result of `capture`."""
    torch.set_rng_state(state["torch"])
    kind, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), position, has_gauss, gauss))
    version, words, next_gauss = state["python"]
    random.setstate((version, tuple(words.tolist()), next_gauss))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def mix(*numbers: int) -> int:
    """One seed of 63 bits from several numbers; close inputs give unrelated seeds, the same on every machine."""
    text = ",".join(str(n) for n in numbers).encode()
    return (zlib.crc32(text) << 31 | zlib.crc32(text[::-1] + b"paceline")) & (2**63 - 1)


def seed_all(seed: int) -> None:
    """Seed torch's CPU generator, NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context in which the global generators start from `seed`; restores their state."""
    before = capture()
    try:
        seed_all(seed)
        yield
    finally:
        restore(before)
