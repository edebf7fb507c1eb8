# SPDX-License-Identifier: Apache-2.0
"""Whole runs over the `ssh` of `fake_ssh.py`, which needs neither root nor a server: two homes on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.communication import schedulers
from paceline.observe.reports.read import read_run
from tests.cli.ssh import fake_ssh
from tests.paths import python_path

pytestmark = [pytest.mark.processes, pytest.mark.plugins]
DEADLINE_S = 150.0
TRAIN = """
import os, sys, time
import torch
import paceline

how, rank = sys.argv[1], int(os.environ["RANK"])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.attach(model, optimizer, rule="bmuf", period=4)
print("worker", rank, "of", os.environ["WORLD_SIZE"], "in", os.getcwd(), flush=True)
for step in range(20 if how != "endless" else 10**9):
    if how == "fails" and rank == 2 and step == 10:
        raise ValueError("spoilt")
    optimizer.zero_grad()
    model(torch.ones(8, 1)).square().mean().backward()
    optimizer.step()
    time.sleep(0.01 if how == "endless" else 0)
run.close()
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").write_text(TRAIN)
    (tmp_path / "hosts").mkdir()
    return place


def start(project: Path, how: str, *options: str, names: str = "a,b") -> subprocess.Popen[bytes]:
    plain = {name: value for name, value in schedulers.alone(os.environ).items() if not name.startswith("PACELINE_")}
    shell = f"PYTHONPATH={python_path()}\nOMP_NUM_THREADS=1\nGLOO_SOCKET_IFNAME=lo"
    hosts = project.parent / "hosts" / "of"
    more = fake_ssh.install(hosts, "a", "b")
    for name in "ab":
        (hosts / name / "environment").write_text(shell)
    (hosts / "b" / "proj").mkdir()
    (project / "paceline.toml").write_text("[hosts.b]\nworkers = 2\ndirectory = '~/proj'\n")
    command = [sys.executable, "-m", "paceline", "run", "--hosts", names, "--log", "logs", *options, "train.py", how]
    here = {"PYTHONPATH": python_path(), "COLUMNS": "200", "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with (project / "said.txt").open("w") as said:  # in the program's own folder, as with nohup
        return subprocess.Popen(
            command, cwd=project, env={**plain, **more, **here}, stdout=said, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip


def finish(process: subprocess.Popen[bytes], project: Path) -> str:
    try:
        process.wait(DEADLINE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return (project / "said.txt").read_text()


def of_both(project: Path, name: str) -> list[Path]:
    return sorted((project.parent / "hosts" / "of").glob(f"[ab]/{name}"))


@pytest.mark.claim
def test_one_command_is_one_run_of_three_workers(project: Path) -> None:
    process = start(project, "once", names="localhost,b")
    said = finish(process, project)
    assert process.returncode == 0, said
    copy = of_both(project, ".cache/paceline/programs/*")
    assert len(copy) == 1 and copy[0].parts[-5] == "b"
    assert f"[localhost 0] worker 0 of 3 in {project}" in said, said  # here it runs where it lies
    for rank in (1, 2):
        assert f"[b {rank}] worker {rank} of 3 in {copy[0]}" in said, said
    assert [worker.rank for worker in read_run(project / "logs").workers] == [0, 1, 2]
    assert of_both(project, ".cache/paceline/jobs/*/*") == []


@pytest.mark.slow
def test_the_receipts_of_all_hosts_come_together_with_their_seals(project: Path) -> None:
    process = start(project, "once", "--receipts", names="localhost,b")  # one worker there, and two
    said = finish(process, project)
    assert process.returncode == 0, said
    found = CliRunner().invoke(app, ["verify", str(project / "logs")], env={"COLUMNS": "400"})
    assert found.exit_code == 2, found.output  # the program has data of its own
    assert "right: 3 chains, sealed by the authority" in found.output, found.output
    assert "right: 5 merges" in found.output and "wrong" not in found.output, found.output


def test_a_signal_ends_all_hosts(project: Path) -> None:
    process = start(project, "endless")
    outputs = [project / "logs" / "output" / f"rank-{rank:03d}.out" for rank in range(3)]
    until = time.monotonic() + DEADLINE_S
    while not all(path.exists() and path.stat().st_size for path in outputs):
        assert time.monotonic() < until and process.poll() is None, finish(process, project)
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    said = finish(process, project)
    assert process.returncode == 128 + signal.SIGTERM and "stopped by SIGTERM" in said, said
    assert of_both(project, ".cache/paceline/jobs/*/*") == []
