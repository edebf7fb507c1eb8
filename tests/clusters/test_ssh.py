# SPDX-License-Identifier: Apache-2.0
"""`paceline run --hosts host0,host1` over OpenSSH's own sshd: runs, failures, Ctrl-C, killed launchers, cut links."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from devtools.emulation.ssh_machines import Machines, machines, possible

from paceline.communication import schedulers
from paceline.observe.reports.read import read_run
from tests.paths import python_path
from tests.waiting import until

pytestmark = [pytest.mark.network, pytest.mark.skipif(bool(possible()), reason=possible()), pytest.mark.timeout(300)]
DEADLINE_S = 120.0
HOSTS = "host0,host1"

TRAIN = """
import os, sys, time
import torch
import helper
import paceline

how = sys.argv[1]
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = paceline.attach(model, optimizer, rule="bmuf", period=4)
rank, size = int(os.environ.get("RANK", "-1")), os.environ.get("WORLD_SIZE", "some")
word = os.environ.get("WORD", "-")
print("attached as", rank, "of", size, os.uname().nodename, helper.WORD, word, flush=True)
steps = {"endless": 10**9, "long": 1500}.get(how, 40)
for step in range(steps):
    if how == "fails" and rank == 1 and step == 10:
        raise SystemExit(7)
    optimizer.zero_grad()
    model(torch.ones(8, 1)).square().mean().backward()
    optimizer.step()
    if how in ("endless", "long"):
        time.sleep(0.01)
    if step == 8:
        print("trains", flush=True)
run.close()
"""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines"), 2, servers=[1]) as found:
        yield found


@pytest.fixture
def project(tmp_path: Path, pair: Machines) -> Path:
    """The program's folder, as host0 has it; host1 has none of the same path."""
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").write_text(TRAIN)
    (place / "helper.py").write_text("WORD = 'first'")
    (tmp_path / "empty").mkdir()
    (place / "paceline.toml").write_text(
        f"[hosts.host0]\n[hosts.host1]\npython = '{sys.executable}'\ndirectory = '{tmp_path / 'empty'}'\n"
        f"[hosts.host1.environment]\nPYTHONPATH = '{python_path()}'\nOMP_NUM_THREADS = '1'\nWORD = 'told'\n"
    )
    return place


def start(pair: Machines, project: Path, *arguments: str, hosts: str = HOSTS) -> subprocess.Popen[str]:
    plain = {name: "" for name in os.environ.keys() - schedulers.alone(os.environ).keys()}
    more = {**plain, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    command = [sys.executable, "-m", "paceline", "run", "--hosts", hosts, "--log", "logs", *arguments]
    return pair.start(0, command, project, more)


def finish(process: subprocess.Popen[str], within_s: float = DEADLINE_S) -> str:
    try:
        return process.communicate(timeout=within_s)[0]
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"still runs after {within_s} s: {error.output!r}") from error
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def trains(project: Path, rank: int, kind: str = "rank") -> bool:
    """Whether a worker has said so, in the log directory of the machine from which all was started."""
    path = project / "logs" / "output" / f"{kind}-{rank:03d}.out"
    return path.exists() and "trains" in path.read_text()


def nothing_is_left(pair: Machines, project: Path) -> None:
    for machine in range(2):
        until(lambda machine=machine: not pair.processes(machine, "train.py"), deadline_s=40.0)
        until(lambda machine=machine: not pair.processes(machine, "sys.stdin.buffer.read"), deadline_s=40.0)
    assert list(pair.folder.rglob("job.pem")) == []


def test_two_machines_are_one_run(pair: Machines, project: Path) -> None:
    process = start(pair, project, "train.py", "once")
    said = finish(process)
    assert process.returncode == 0, said
    assert "[host0 0] attached as 0 of 2 host0 first -" in said, said
    assert "[host1 1] attached as 1 of 2 host1 first told" in said, said
    assert "host1: copying" in said and "2 workers finished" in said, said
    assert [worker.rank for worker in read_run(project / "logs").workers] == [0, 1]
    nothing_is_left(pair, project)

    (project / "helper.py").write_text("WORD = 'second'")  # only what changed is brought again
    process = start(pair, project, "--overwrite", "--workers", "2", "train.py", "once")
    said = finish(process)
    assert process.returncode == 0 and "host1: copying 1 file (" in said, said
    assert "[host1 3] attached as 3 of 4 host1 second told" in said, said


def test_a_worker_that_fails_elsewhere_gives_its_exit_code_and_its_host(pair: Machines, project: Path) -> None:
    process = start(pair, project, "train.py", "fails")
    said = finish(process)
    assert process.returncode == 7, said
    assert "worker 1 on host1 failed" in said and "exit code 7" in said, said
    nothing_is_left(pair, project)


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_ends_all(pair: Machines, project: Path, times: int) -> None:
    process = start(pair, project, "train.py", "endless")
    until(lambda: trains(project, 0) and trains(project, 1))
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    said = finish(process, 60.0)
    assert process.returncode == 130 and "stopped by SIGINT" in said, said
    nothing_is_left(pair, project)


def test_an_elastic_run_goes_on_without_a_host(pair: Machines, project: Path) -> None:
    process = start(pair, project, "--elastic", "1:2", "train.py", "long")
    until(lambda: trains(project, 0, "place") and trains(project, 1, "place"))
    listening = int((pair.folder / "host1.pid").read_text())
    for pid in pair.processes(1, "sshd"):
        if pid != listening:
            os.kill(pid, signal.SIGKILL)
    said = finish(process)
    assert process.returncode == 0, said
    assert "[host0 0] attached as" in said and "[host1 1] attached as" in said, said
    assert "[host0] host1 is lost, and the run goes on without it" in said, said
    assert len(list((project / "logs").glob("rank-*.jsonl"))) == 2
    nothing_is_left(pair, project)


def test_a_link_that_is_cut_is_a_host_that_is_lost(pair: Machines, project: Path) -> None:
    process = start(pair, project, "train.py", "endless")
    until(lambda: trains(project, 0) and trains(project, 1))
    pair.network.cut(1)
    try:
        said = finish(process, 90.0)
    finally:
        pair.network.mend(1)
    assert process.returncode == 1 and "host1 was lost" in said, said
    until(lambda: not pair.processes(0, "train.py"), deadline_s=40.0)
    until(lambda: not pair.processes(1, "train.py"), deadline_s=100.0)
    nothing_is_left(pair, project)


def test_the_secret_is_on_no_command_line_and_in_no_environment(pair: Machines, project: Path) -> None:
    process = start(pair, project, "train.py", "endless")
    until(lambda: trains(project, 0) and trains(project, 1))
    secrets = list(pair.folder.rglob("job.pem"))
    assert [path.stat().st_mode & 0o777 for path in secrets] == [0o600]
    lines = [line for line in secrets[0].read_text().splitlines() if len(line) > 40]
    for machine in range(2):
        for pid in pair.processes(machine, ""):
            for file in ("cmdline", "environ"):
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{pid}/{file}").read_text(errors="replace")
                    assert not any(line in text for line in lines)
    process.send_signal(signal.SIGINT)
    said = finish(process, 60.0)
    assert not any(line in said for line in lines)


def test_the_machine_where_it_is_typed_need_not_take_part(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    place = tmp_path / "project"
    place.mkdir()
    (place / "train.py").write_text(TRAIN)
    (place / "helper.py").write_text("WORD = 'first'")
    tables = [
        f"[hosts.host{index}]\npython = '{sys.executable}'\ndirectory = '{tmp_path}'\n[hosts.host{index}.environment]\n"
        f"PYTHONPATH = '{python_path()}'\nOMP_NUM_THREADS = '1'\n"
        for index in (1, 2)
    ]
    (place / "paceline.toml").write_text("".join(tables))
    with machines(tmp_path_factory.mktemp("machines"), 3, servers=[1, 2]) as three:
        first = three.network.address(1)
        for change in ("add", "del"):  # on host2, as a firewall would have it
            route = [*three.network.prefix(2), "ip", "route", change, "blackhole", f"{first}/32"]
            subprocess.run(route, check=True, timeout=60)
            process = start(three, place, "train.py", "once", hosts="all")
            said = finish(process)
            if change == "add":
                assert process.returncode == 2 and f"host2: it does not reach host1 at {first}:" in said, said
        assert process.returncode == 0, said
        assert "[host1 0] attached as 0 of 2 host1" in said and "[host2 1] attached as 1 of 2 host2" in said, said
        assert [worker.rank for worker in read_run(place / "logs").workers] == [0, 1]
