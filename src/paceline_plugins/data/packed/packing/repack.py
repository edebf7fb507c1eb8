# SPDX-License-Identifier: Apache-2.0
"""A packed data set as a source, for shards of another size or another order."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np

from paceline_plugins.data.packed.dataset import PackedDataset
from paceline_plugins.data.packed.packing.base import SourceProgress, Task


class RepackSource:
    """The samples of a packed data set; with a seed memory holds 8 bytes a sample."""

    def __init__(self, root: Path) -> None:
        self._data = PackedDataset(str(root))
        self.progress = SourceProgress()

    def tasks(self, seed: int | None) -> Iterator[Task]:
        """One task for each sample."""
        count = len(self._data)
        order = range(count) if seed is None else np.random.default_rng(seed).permutation(count)
        for position, sample in enumerate(order):
            self.progress.fraction = position / count
            yield partial(self._data.members, int(sample))
