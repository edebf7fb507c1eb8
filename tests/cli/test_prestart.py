# SPDX-License-Identifier: Apache-2.0
"""Workers that start before torch is loaded: who gets some, what they are told, and that none is left."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.launch import rendezvous_of
from paceline.cli.launch.prestart import prestart
from paceline.cli.launch.spawn import Command
from paceline.core import parent_death

TELL = "import json, os, sys; json.dump(dict(os.environ), sys.stdout)"
STAY = "import sys; sys.stdin.read(); import time; time.sleep(600)"


def command(code: str, folder: Path) -> Command:
    return Command([sys.executable, "-c", code], {}, folder)


@pytest.mark.processes
def test_workers_know_who_they_are_and_where_the_store_will_be(tmp_path: Path) -> None:
    with prestart(LaunchCluster(2), command(TELL, tmp_path)) as prestarted:
        assert prestarted is not None
        assert [worker.process.wait(60) for worker in prestarted.workers] == [0, 0]
        port = str(prestarted.listener.getsockname()[1])
    told = [json.loads(worker.stdout.read_text()) for worker in prestarted.workers]
    assert [one["RANK"] for one in told] == ["0", "1"]
    assert {(one["WORLD_SIZE"], one["MASTER_ADDR"], one["MASTER_PORT"]) for one in told} == {("2", "127.0.0.1", port)}
    assert {one["TORCHELASTIC_RUN_ID"] for one in told} == {prestarted.run_id}


@pytest.mark.processes
def test_no_worker_outlives_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="torch"), prestart(LaunchCluster(2), command(STAY, tmp_path)) as prestarted:
        assert prestarted is not None
        raise RuntimeError("torch cannot be loaded")
    assert prestarted is not None
    assert all(worker.process.returncode is not None for worker in prestarted.workers)


@pytest.mark.processes
def test_the_store_is_where_the_workers_look_for_it(tmp_path: Path) -> None:
    with prestart(LaunchCluster(1), command("", tmp_path)) as prestarted:
        assert prestarted is not None
        port = prestarted.listener.getsockname()[1]
        handler = rendezvous_of(LaunchCluster(1), prestarted)
        found = handler.next_rendezvous()
        assert (found.bootstrap_store_info.master_port, handler.get_run_id()) == (port, prestarted.run_id)
        found.store.set("key", "value")
        assert found.store.get("key") == b"value"


@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    [
        *(f"paceline.cli.launch.{one}" for one in ("cluster", "prestart", "signals", "spawn")),
        "paceline_plugins.zero.forks",
    ],
)
def test_it_needs_no_torch(name: str) -> None:
    program = f"import sys, {name}; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True)
    assert said.stdout.split() == ["False"]


def test_what_is_executed_by_its_path_needs_the_standard_library_alone() -> None:
    nodes = list(ast.walk(ast.parse(Path(parent_death.__file__).read_text(encoding="utf-8"))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert imported and imported <= set(sys.stdlib_module_names)
