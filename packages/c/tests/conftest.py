# SPDX-License-Identifier: Apache-2.0
"""The library, built once for all tests; no setting of a surrounding launcher, and no run that is left open."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

collect_ignore_glob = [] if importlib.util.find_spec("paceline_c") else ["*"]
LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests here need a compiler, and so start processes."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("processes")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER, *(name for name in os.environ if name.startswith("PACELINE_"))]:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library was built."""
    if shutil.which("cc") is None or shutil.which("c++") is None:
        pytest.skip("there is no C or C++ compiler")
    from paceline_c.build import Place, build

    place = Place(tmp_path_factory.mktemp("prefix"))
    build(place, ("-Wall", "-Wextra", "-Werror"))
    return place.prefix


@pytest.fixture
def library(prefix: Path) -> Iterator[object]:
    """The library inside of this Python."""
    from c_helpers import load

    found = load(prefix)
    yield found
    found.pl_abandon()
