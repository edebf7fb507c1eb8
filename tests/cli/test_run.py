# SPDX-License-Identifier: Apache-2.0
"""`paceline run`: workers start, speak, fail and stop, and none is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run.conclusion import clear
from tests.paths import python_path
from tests.ports import free_port
from tests.waiting import alive

DEADLINE_S = 150.0
Script = Callable[[str], Path]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands run in an empty directory, and what they export ends with the test."""
    monkeypatch.chdir(tmp_path)
    for name in ("PACELINE_RULE", "PACELINE_LOG", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", python_path())  # for the workers


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def write(text: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


@contextlib.contextmanager
def begun(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A command as a process of its own, which does not outlive the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "paceline", *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def started(*arguments: object) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """`paceline run`, as a process of its own."""
    return begun("run", *arguments)


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


PRINT_WHO = """
    import os, sys
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PACELINE_RULE", "PACELINE_TIMEOUT_S",
             "OMP_NUM_THREADS", "PACELINE_LOG")
    print(*(os.environ.get(name) for name in names))
    print("arguments", sys.argv[1:])
    print("complaint", file=sys.stderr)
"""

FAMILY = """
    import os, signal, subprocess, time
    {ignore}
    child = subprocess.Popen(["sleep", "300"])
    with open(f"new-{{os.environ['RANK']}}", "w") as file:
        file.write(f"{{os.getpid()}} {{child.pid}}")
    os.rename(file.name, file.name.replace("new", "pids"))
    print("ready")
    {then}
    time.sleep(300)
"""


def family(directory: Path) -> list[int]:
    return [int(pid) for path in directory.glob("pids-*") for pid in path.read_text().split()]


@pytest.mark.processes
def test_every_worker_knows_who_it_is(script: Script, tmp_path: Path) -> None:
    path = script(PRINT_WHO)
    result = run(
        "--workers", 2, "--rule", "bmuf(period=4)", "--timeout", 30, "--log", "log", path,
        "--", "--lr", 0.1, "--",
    )  # fmt: skip
    assert result.exit_code == 1 and "The rule bmuf(period=4) was never used" in result.stderr, result.output
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in range(2):
        wanted = f"[{rank}] {rank} 2 {rank} bmuf(period=4) 30 {threads} {tmp_path / 'log'}"
        assert wanted in result.stdout.splitlines()
        assert f"[{rank}] arguments ['--lr', '0.1', '--']" in result.stdout
        assert f"[{rank}] complaint" in result.stderr
        assert "complaint\n" in (tmp_path / "log" / "output" / f"rank-{rank:03d}.err").read_text()
    assert "2 workers finished" in result.stderr


@pytest.mark.processes
def test_a_worker_that_raises_is_named_with_its_last_words(script: Script) -> None:
    path = script(
        """
        import os, time
        if os.environ["RANK"] == "1":
            raise ValueError("the third number is odd")
        time.sleep(300)
        """
    )
    result = run("--workers", 2, path)
    assert result.exit_code == 1
    panel = result.stderr.split("\u256d")[1]
    assert f"worker 1 on {socket.gethostname()} failed" in panel
    assert panel.index("ValueError: the third number is odd") < panel.index("Traceback")
    assert "the other 1 here was stopped" in panel
    assert "rank-001.err" in panel
    assert "elastic" not in result.output


@pytest.mark.processes
def test_a_killed_worker_takes_its_family_and_the_others_along(script: Script, tmp_path: Path) -> None:
    kill = """
    if os.environ["RANK"] == "1":
        while not os.path.exists("pids-0"):
            pass
        os.kill(os.getpid(), signal.SIGKILL)
    """
    path = script(FAMILY.format(ignore="", then=textwrap.dedent(kill).replace("\n", "\n    ")))
    result = run("--workers", 2, path)
    assert result.exit_code == 128 + signal.SIGKILL
    assert "worker 1 on" in result.stderr
    assert "killed by SIGKILL (9)" in result.stderr
    assert "memory" in result.stderr
    pids = family(tmp_path)
    assert len(pids) == 4
    assert_gone(pids)


@pytest.mark.processes
@pytest.mark.skipif(sys.platform != "linux", reason="only this kernel is asked to end them")
def test_workers_end_with_a_launcher_that_is_killed(script: Script, tmp_path: Path) -> None:
    """They would write into the checkpoints of the run that is started in its stead."""
    with started("--workers", 2, script(FAMILY.format(ignore="", then=""))) as process:
        deadline = time.monotonic() + DEADLINE_S
        while len(pids := list(tmp_path.glob("pids-*"))) < 2:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.communicate()
        workers = [int(path.read_text().split()[0]) for path in pids]
        children = [int(path.read_text().split()[1]) for path in pids]
        try:
            assert_gone(workers)
        finally:
            for pid in [*workers, *children]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


ASYNCHRONOUS = """
    import os, signal, time
    import torch, paceline
    torch.set_num_threads(1)
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    run = paceline.attach(model, optimizer)
    steps = 0
    while steps < 10 or not os.path.exists("enough"):
        optimizer.zero_grad()
        model(torch.randn(4, 40)).square().mean().backward()
        optimizer.step()
        steps += 1
        if steps == 5 and run.world.rank in {victims}:
            {fail}
        if run.world.rank == 2 and "is lost" in open(os.environ["PACELINE_LOG"] + "/output/rank-002.err").read():
            open("enough", "w").close()
    run.close()
    print("finished")
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("fail", "how"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "killed by SIGKILL (9)"),
        pytest.param("raise ValueError('odd')", "exit code 1", marks=pytest.mark.slow),
    ],
)
def test_under_an_asynchronous_rule_the_others_go_on(script: Script, fail: str, how: str) -> None:
    """The exit code and the last words say that one is missing."""
    path = script(ASYNCHRONOUS.format(victims={1}, fail=fail))
    result = run("--workers", 3, "--rule", "asgd", "--timeout", 30, "--log", "log", path)
    assert result.exit_code == 3, result.output
    assert f"[1] this worker is lost: {how}; the other workers continue" in result.stderr
    assert f"worker 1 on {socket.gethostname()} was lost; the other workers continued" in result.stderr
    assert "2 workers finished here" in result.stderr and "without 1" in result.stderr
    assert "[0] finished" in result.stdout and "[2] finished" in result.stdout


@pytest.mark.processes
@pytest.mark.parametrize(
    ("which", "ignore"), [(signal.SIGINT, ""), (signal.SIGTERM, "signal.signal(signal.SIGTERM, signal.SIG_IGN)")]
)
def test_a_signal_stops_everything(script: Script, tmp_path: Path, which: signal.Signals, ignore: str) -> None:
    path = script(FAMILY.format(ignore=ignore, then=""))
    with started("--workers", 2, path) as process:
        assert process.stdout is not None
        ready = sorted(process.stdout.readline() for _ in range(2))
        assert ready == ["[0] ready\n", "[1] ready\n"]
        process.send_signal(which)
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + which
    assert f"stopped by {which.name}" in errors
    assert "Traceback" not in errors
    pids = family(tmp_path)
    assert len(pids) == 4
    assert_gone(pids)


RESTARTED = """
    import os, time
    rank, start = os.environ["RANK"], os.environ["PACELINE_RESTART"]
    print("start", start)
    if rank == "{last}" and int(start) < {bad}:
        raise SystemExit(7)
    time.sleep(300 if int(start) < {bad} else 0)
"""


@pytest.mark.slow
@pytest.mark.processes
def test_two_hosts_start_again_together(script: Script) -> None:
    path = script(RESTARTED.format(last=1, bad=2))
    common = ["--as-is", "--restarts", 2, "--hosts", 2, "--master", f"127.0.0.1:{free_port()}", "--timeout", 60]
    with (
        started(*common, "--host-index", 0, "--log", "a", path) as first,
        started(*common, "--host-index", 1, "--log", "b", path) as second,
    ):
        out_1, err_1 = second.communicate(timeout=DEADLINE_S)
        out_0, err_0 = first.communicate(timeout=DEADLINE_S)
    assert (first.returncode, second.returncode) == (0, 0), err_0 + err_1
    assert "[0] start 2" in out_0 and "[1] start 2" in out_1
    assert "the run ended: worker 1 on" in err_0 and "(2 of 2 restarts)" in err_0 and "(2 of 2 restarts)" in err_1


@pytest.mark.processes
def test_two_hosts_are_one_cluster_and_fail_together(script: Script) -> None:
    path = script(
        """
        import os, time
        print("of", os.environ["WORLD_SIZE"])
        if os.environ["RANK"] == "3":
            raise SystemExit(5)
        time.sleep(300)
        """
    )
    common = ["--workers", 2, "--hosts", 2, "--master", f"127.0.0.1:{free_port()}", "--timeout", 40]
    with (
        started(*common, "--host-index", 0, "--log", "a", path) as first,
        started(*common, "--host-index", 1, "--log", "b", path) as second,
    ):
        out_1, err_1 = second.communicate(timeout=DEADLINE_S)
        out_0, err_0 = first.communicate(timeout=DEADLINE_S)
    assert set(out_0.split("\n")) <= {"[0] of 4", "[1] of 4", ""}
    assert "[3] of 4" in out_1
    assert (first.returncode, second.returncode) == (1, 5)
    assert "worker 3 on" in err_0
    assert "worker 3 on" in err_1


@pytest.mark.plugins
def test_a_host_that_meets_nobody_says_so(script: Script) -> None:
    path = script("print('never')")
    address = f"127.0.0.1:{free_port()}"
    result = run("--hosts", 2, "--host-index", 1, "--master", address, "--timeout", 1, path)
    assert result.exit_code == 1
    assert f"the 2 hosts did not meet at {address} within 1 s" in result.stderr
    assert "never" not in result.stdout


def test_the_help_shows_twelve_options_and_names_the_way_to_all() -> None:
    few, every = (re.findall(r"^  (--?[a-z-]+)", run(how).stdout, re.MULTILINE) for how in ("--help", "--help-all"))
    assert len(few) == 12 + 1 and set(few) < set(every) and few[:2] == ["--workers", "--hosts"]
    assert "--help-all" in run("--help").stdout


@pytest.mark.processes
def test_a_run_is_not_written_over_another(script: Script, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.mkdir()
    (log / "rank-005.jsonl").touch()
    path = script("print('hello')")
    refused = run("--log", log, path)
    assert refused.exit_code == 2
    assert "already holds a run" in refused.stderr
    assert (log / "rank-005.jsonl").exists()
    assert run("--log", log, "--overwrite", path).exit_code == 0
    assert not (log / "rank-005.jsonl").exists()


@pytest.mark.parametrize(
    ("code", "cluster", "left"),
    [
        (0, None, ["rank-000.out"]),
        (3, None, ["host-0", "host-1", "rank-000.out", "rank-001", "rank-002"]),
        (0, LaunchCluster(2, 2, 1), ["host-0", "rank-000.out", "rank-001"]),  # host 0 may still need its own
    ],
)
def test_keys_and_copies_of_files_go_when_a_run_has_ended_well(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], code: int, cluster: LaunchCluster | None, left: list[str]
) -> None:
    for name in (
        "certificates/host-0",
        "certificates/host-1",
        "files/rank-001",
        "files/rank-002",
        "output/rank-000.out",
    ):
        (tmp_path / name).mkdir(parents=True)
    assert clear(tmp_path, code, cluster=cluster) == code
    assert sorted(path.name for path in tmp_path.glob("*/*")) == left
    assert ("kept, as the run failed: its keys in " in capfd.readouterr().err) == bool(code)
