# SPDX-License-Identifier: Apache-2.0
"""`paceline doctor`: on this machine, on emulated hosts with something wrong, and with input that makes no sense."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from devtools.emulation import EmulatedNetwork
from typer.testing import CliRunner, Result

from paceline.cli import app
from tests.paths import python_path
from tests.ports import free_port

pytestmark = pytest.mark.plugins

DEADLINE_S = 120.0
needs_root = pytest.mark.skipif(bool(EmulatedNetwork.possible()), reason=EmulatedNetwork.possible())


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)])


def environment(**more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PACELINE_", "PYTEST_", "GLOO_"))}
    return kept | {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "COLUMNS": "200"} | more


def start(prefix: list[str], *arguments: object, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-m", "paceline", "doctor", *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each, within the deadline."""
    until = time.monotonic() + DEADLINE_S
    try:
        said = [process.communicate(timeout=max(1.0, until - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(process.returncode, *texts) for process, texts in zip(processes, said, strict=True)]


def wrong(values: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by what it is about."""
    return {f["about"]: f["sentence"] for f in values["findings"] if f["severity"] == "wrong"}


@pytest.mark.processes
def test_three_workers_on_this_machine() -> None:
    asked = ["--workers", 3, "--parameters", "25.6M", "--json"]
    [(code, output, errors)] = ends([start([], *asked, GLOO_SOCKET_IFNAME="lo")])
    assert code == 0, errors
    values = json.loads(output)
    assert values["fit"] is True
    assert values["lost"] == []
    assert len(values["machines"]) == 3
    assert len(values["links"]) == 6
    assert all(link["bandwidth_bytes_s"] > 0 and link["latency_s"] > 0 for link in values["links"])
    assert values["exchange_s"] == pytest.approx(4 / 3 * 4 * 25.6e6 / values["slowest_bytes_s"])


@pytest.mark.slow
@pytest.mark.processes
def test_under_a_launcher_rank_0_prints_and_all_end_alike() -> None:
    port = str(free_port())
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"}
    first, second = ends([start([], RANK=str(rank), **place) for rank in range(2)])
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    assert first[1].splitlines()[-1] == "fit for training"
    assert second[1] == ""


@pytest.mark.slow
@pytest.mark.processes
def test_a_master_that_cannot_be_reached_is_named() -> None:
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    [(code, _, errors)] = ends([start([], PACELINE_TIMEOUT_S="1", **place)])
    assert code == 1
    assert f"cannot reach MASTER_ADDR:MASTER_PORT 127.0.0.1:{place['MASTER_PORT']}" in errors
    assert "Traceback" not in errors


@pytest.fixture
def three_hosts(real_processes: None) -> Iterator[EmulatedNetwork]:
    with EmulatedNetwork(hosts=3, rate_mbit=50) as network:
        yield network


def examine(network: EmulatedNetwork, *arguments: object, **more: str) -> list[tuple[int, str, str]]:
    """The doctor on every host, as a person starts it there."""
    master = ["--hosts", network.hosts, "--master", f"{network.address(0)}:29500", "--json"]
    return ends(
        [start(network.prefix(k), *master, "--host-index", k, *arguments, **more) for k in range(network.hosts)]
    )


@pytest.mark.slow
@needs_root
@pytest.mark.network
@pytest.mark.processes
def test_a_cut_cable_is_named_on_both_sides(three_hosts: EmulatedNetwork) -> None:
    three_hosts.cut(2)
    (code, output, errors), _, last = examine(three_hosts, PACELINE_TIMEOUT_S="12")
    assert code == 1, errors
    assert wrong(json.loads(output))["workers"] == "rank 2 did not come within 12 s"
    assert last[0] == 1
    assert "rank 2 on host2 cannot reach MASTER_ADDR:MASTER_PORT" in last[2].replace("│\n│ ", "")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", 0], "--workers must be at least 1, got 0"),
        (["--hosts", 2], "--hosts 2 needs --master HOST:PORT"),
        (["--parameters", "many"], "--parameters must be a number"),
    ],
)
def test_input_that_makes_no_sense_is_refused(
    arguments: list[object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    result = call(*arguments)
    assert result.exit_code == 2
    assert words in result.stderr
