# SPDX-License-Identifier: Apache-2.0
"""A data set that is packed already: into shards of another size, or in another order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from paceline.data.packed.dataset import PackedDataset
from paceline.data.packed.packing.base import SourceProgress, Task


class RepackSource:
    """The samples of a packed data set; with a seed their order takes 8 bytes a sample.

    Args:
        root: its directory.
    """

    def __init__(self, root: Path) -> None:
        self._data = PackedDataset(str(root))
        self.progress = SourceProgress()

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each sample."""
        count = len(self._data)
        order = range(count) if seed is None else np.random.default_rng(seed).permutation(count)
        for place, sample in enumerate(order):
            self.progress.fraction = place / count
            yield partial(self._data.members, int(sample))
