# SPDX-License-Identifier: Apache-2.0
"""Three tiers of tests, one thread for each test process, and no setting of a surrounding launcher.

`make test` runs the fast tier: pure functions and virtual workers, with every claim of the README. `make test-all` runs
the mark `full`, too: what starts real processes or makes networks, and the adapters of frameworks. A test of real
processes that shows a claim of the README is marked `claim` and runs in the fast tier. `pytest -m slow` runs the rest.
Of a table of parameters that marks no row itself the fast tier runs `ROWS` rows, with each value where that is enough
(of one that marks rows twice as many), and `make test-all` as many others, of a `law` all; of real processes it runs
the first row.
"""

from __future__ import annotations

import gc
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
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
"""Of a table, in the fast tier, and as many others in `make test-all`."""
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


@cache
def _imports_a_plugin(path: Path) -> bool:
    """Whether it is a folder or a module whose tests import a plugin, perhaps by way of another module of tests."""
    path = path / "conftest.py" if path.is_dir() else path
    text = path.read_text(encoding="utf-8") if path.suffix == ".py" and path.is_file() else ""
    others = re.findall(r"^from (tests[.\w]*) import (\w+)", text, re.MULTILINE)
    places = (HERE.parent / name.replace(".", "/") for pair in others for name in (pair[0], ".".join(pair)))
    return "paceline_plugins" in text or any(_imports_a_plugin(place.with_suffix(".py")) for place in places)


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """A module that imports a plugin has no test of the core alone."""
    return None if PLUGINS else _imports_a_plugin(collection_path) or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give each test its tier."""
    tables: dict[str, list[pytest.Function]] = {}
    outside: set[str] = set()  # nodes of real processes, and of what stands beside the core
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
            outside.add(item.nodeid)
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            tables.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for rows in tables.values():
        if not any(item.get_closest_marker(name) for name in ("full", "slow", "claim") for item in rows):
            rest = _rest(rows)
            later = _rest(rest)
        else:
            law = rows[0].get_closest_marker("law")
            fast = [row for row in rows if not any(row.get_closest_marker(name) for name in ("full", "slow", "claim"))]
            rest = [row for row in rows if row.get_closest_marker("full") and not row.get_closest_marker("slow")]
            rest += [] if law else _rest(fast, 2 * ROWS)
            real = any(row.nodeid in outside for row in rest)
            later = _beyond(rest, law, real)
        for item in rest:
            item.add_marker("full")
        for item in later:
            item.add_marker("slow")


def _beyond(rest: list[pytest.Function], law: pytest.Mark | None, real: bool) -> list[pytest.Function]:
    """Of the rows that are not in the fast tier, those that `make test-all` leaves out."""
    if law is None:
        return rest[1:] if real else _rest(rest)
    return [row for k, row in enumerate(rest) if k % law.kwargs.get("every", 1)]


def _rest(rows: list[pytest.Function], keep: int = ROWS) -> list[pytest.Function]:
    """All but `keep` rows of a table, which are spread evenly over those that have a value for the first time."""
    seen: set[tuple[str, int]] = set()
    first = []
    for row in rows:
        values = set(row.callspec.indices.items())
        if not values <= seen:
            first.append(row)
            seen |= values
    kept = {first[k * len(first) // keep].nodeid for k in range(keep)} if len(rows) > keep else set()
    return [row for row in rows if row.nodeid not in kept] if kept else []


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
