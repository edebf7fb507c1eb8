# SPDX-License-Identifier: Apache-2.0
"""Two tiers of tests, one thread for each test process, and no setting of a surrounding launcher.

`make test` runs the fast tier: pure functions and virtual workers, with every claim of the README. What starts real
processes or makes networks, the adapters of frameworks and the rest of large tables carry the mark `full` and run in
`make test-all`. A test of real processes that shows a claim of the README is marked `claim` and runs in the fast tier.
Of a table of parameters that marks no row itself the fast tier runs `ROWS` rows, with each value where that is enough.
Of a product of parameters `make test-all` runs each value `OFTEN` times, and `pytest -m slow` the other combinations.
"""

from __future__ import annotations

import gc
import importlib.util
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from paceline.communication import schedulers
from tests import process_guard

LAUNCHER = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
OURS = ("PACELINE_RULE", "PACELINE_LOG", "PACELINE_TIMEOUT_S")
HERE = Path(__file__).parent
FRAMEWORKS = (HERE / "doors" / "adapters",)
"""Folders whose tests need a framework that the core does not."""
ROWS = 2
"""Of a table, in the fast tier."""
OFTEN = 2
"""How often `make test-all` runs each value of a product of parameters."""
PLUGINS = importlib.util.find_spec("paceline_plugins") is not None
"""Whether they are installed; without them the core's tests run (`tests/install/test_core_alone.py`)."""

os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE / "startup"), os.environ.get("PYTHONPATH")]))
torch.set_num_threads(1)
gc.disable()  # what is collected stays, and there is much of it
# The same examples every time: a new one that fails is for whoever looks for it, not for who changes something else.
settings.register_profile(
    "same",
    derandomize=not os.environ.get("PACELINE_TEST_RANDOM"),
    deadline=None,  # no test fails because a machine is busy
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("same")
process_guard.install()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A module that imports a plugin has no test of the core alone."""
    if PLUGINS or collection_path.suffix != ".py":
        return None
    return "paceline_plugins" in collection_path.read_text(encoding="utf-8") or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier."""
    tables: dict[str, list[pytest.Function]] = {}
    for item in items:
        started = getattr(item, "callspec", None) and item.callspec.params.get("processes")  # type: ignore[attr-defined]
        if started or "real_processes" in getattr(item, "fixturenames", ()):
            item.add_marker("processes")
        elsewhere = HERE not in item.path.parents or any(folder in item.path.parents for folder in FRAMEWORKS)
        real = any(item.get_closest_marker(name) for name in ("processes", "network"))
        if not PLUGINS and item.get_closest_marker("plugins"):
            item.add_marker(pytest.mark.skip(reason="needs a plugin"))
        if elsewhere or (real and not item.get_closest_marker("claim")):
            item.add_marker("full")
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tables.values():
        if not any(item.get_closest_marker(name) for name in ("full", "slow", "claim") for item in rows):
            for item in _rest(rows):
                item.add_marker("full")
            for item in _repeated(rows):
                item.add_marker("slow")


def _rest(rows: list[pytest.Function]) -> list[pytest.Function]:
    """All but `ROWS` rows of a table, which are spread evenly over those that have a value for the first time."""
    seen: set[tuple[str, int]] = set()
    first = []
    for row in rows:
        values = set(row.callspec.indices.items())
        if not values <= seen:
            first.append(row)
            seen |= values
    kept = {first[k * len(first) // ROWS].nodeid for k in range(ROWS)}
    return [row for row in rows if len(rows) > ROWS and row.nodeid not in kept]


def _repeated(rows: list[pytest.Function]) -> list[pytest.Function]:
    """The rows of a product of parameters, each value of which earlier rows have often enough."""
    if all(len(set(row.callspec.indices.values())) == 1 for row in rows):
        return []  # a list of cases
    seen: Counter[tuple[str, int]] = Counter()
    rest = []
    for row in rows:
        values = row.callspec.indices.items()
        if row.get_closest_marker("full") and all(seen[value] >= OFTEN for value in values):
            rest.append(row)
        else:
            seen.update(values)
    return rest


def pytest_collection_finish() -> None:
    """What was imported stays: no later collection of garbage has to look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def real_processes() -> None:
    """For fixtures that start processes: the tests that use them are marked `processes`. So is one whose parameter
    `processes` says how many it starts."""


@pytest.fixture(autouse=True)
def _only_marked_tests_start_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    with process_guard.watched() as started:
        yield
    if started and not any(request.node.get_closest_marker(name) for name in ("processes", "network")):
        pytest.fail(f"{request.node.nodeid} started a process ({started[0]}): mark it `processes`")


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [*LAUNCHER, *OURS, *(os.environ.keys() - schedulers.alone(os.environ).keys())]:
        monkeypatch.delenv(name, raising=False)
    torch.manual_seed(0)
