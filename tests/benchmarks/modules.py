# SPDX-License-Identifier: Apache-2.0
"""Modules of the benchmarks, for tests of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import paceline

FOLDER = Path(paceline.__file__).parents[2] / "benchmarks"


@contextmanager
def imported(*names: str) -> Iterator[dict[str, ModuleType]]:
    """The modules of these names, whatever their folder, which go out of sight again."""
    known = set(sys.modules)
    with pytest.MonkeyPatch.context() as patch:
        for folder in ("quality", "speed", "faults", "seeds", "common"):
            patch.syspath_prepend(str(FOLDER / folder))
        yield {name: importlib.import_module(name) for name in names}
    for name in set(sys.modules) - known:
        if name.startswith("_"):
            del sys.modules[name]
