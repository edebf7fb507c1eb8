# SPDX-License-Identifier: Apache-2.0
"""A stand-in for openml: 600 rows of four numbers and two kinds, and a target that depends on both."""

from __future__ import annotations

import types
from typing import Any

import numpy
import pandas


class Table:
    """One for all numbers."""

    default_target_attribute = "target"

    def get_data(self, **kwargs: Any) -> tuple[Any, Any, list[bool], list[str]]:
        """Columns, target, which of them are kinds, names."""
        draw = numpy.random.RandomState(0)
        numbers, kinds = draw.normal(size=(600, 4)), draw.randint(0, 3, (600, 2))
        columns = {f"n{n}": numbers[:, n] for n in range(4)} | {
            f"k{n}": [f"k{k}" for k in kinds[:, n]] for n in range(2)
        }
        target = (numbers[:, 0] + kinds[:, 0] > 1).astype(int)
        frame = pandas.DataFrame(columns)
        return frame, pandas.Series(target), [False] * 4 + [True] * 2, list(frame.columns)


datasets = types.SimpleNamespace(get_dataset=lambda number: Table())
