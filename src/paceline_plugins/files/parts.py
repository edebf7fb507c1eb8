# SPDX-License-Identifier: Apache-2.0
"""Which part of the data each worker takes in a block.

An epoch has P parts, and a block takes as many of them as there are workers. The parts of an epoch are numbered through
its blocks: worker r of N takes place b N + r in block b. A list of lines is shuffled anew for each epoch and cut into
P parts of equal length, give or take one line; without a list the parts themselves are shuffled.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from paceline.data.sampling.sampler import Permutation
from paceline.errors import DataError, UnsupportedError

_EPOCH_KEY = 1_000_003
SEEDS = 2**31 - 1


class Parts:
    """The parts of all epochs.

    Args:
        count: P.
        seed: of the orders.
        shuffle: whether an epoch has an order of its own.
        lines: of the list, or None.

    Raises:
        DataError: the list has too few lines.
    """

    def __init__(self, count: int, seed: int, shuffle: bool, lines: list[bytes] | None = None) -> None:
        if lines is not None and len(lines) < count:
            have = f"{len(lines)} line{'s' if len(lines) != 1 else ''}"
            raise DataError(f"the list has {have}, and an epoch {count} parts: some would be empty; give fewer --parts")
        self.count, self._seed, self._shuffle, self._lines = count, seed, shuffle, lines

    def number(self, epoch: int, place: int) -> int:
        """The part at a place of an epoch."""
        if self._lines is not None or not self._shuffle:
            return place
        return int(self._order(epoch, self.count).at(np.array([place]))[0])

    def lines(self, epoch: int, part: int) -> bytes:
        """The text of a part's lines."""
        assert self._lines is not None
        total = len(self._lines)
        places = np.arange(total * part // self.count, total * (part + 1) // self.count)
        if self._shuffle:
            places = self._order(epoch, total).at(places)
        return b"".join(self._lines[place] for place in places)

    def seed(self, epoch: int, part: int) -> int:
        """A number below 2^31 for the tool's own generator."""
        return int(Permutation(SEEDS, self._seed * _EPOCH_KEY + epoch).at(np.array([part]))[0])

    def _order(self, epoch: int, total: int) -> Permutation:
        return Permutation(total, self._seed * _EPOCH_KEY + epoch)


def read_list(path: Path) -> list[bytes]:
    """The lines of a data list, each with its line end; empty lines are left out.

    Raises:
        DataError: it cannot be read, or has no lines.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(f"the list {path} cannot be read ({error.strerror or error})") from error
    found = [line + b"\n" for line in lines if line.strip()]
    if not found:
        raise DataError(f"the list {path} has no line: there is no sample to train on")
    return found


def check_divides(workers: int, parts: int, done: int) -> None:
    """Refuse a number of workers that leaves a worker without a part in an epoch's last block.

    Args:
        workers: N.
        parts: P.
        done: parts of the epoch that are done.
    """
    if (parts - done) % workers:
        left = f"{parts - done} of its {parts} parts are left" if done else f"it has {parts} parts (--parts)"
        raise UnsupportedError(
            f"{workers} workers take {workers} parts of an epoch in each block, and {left}: give a number of workers "
            "that divides it"
        )
