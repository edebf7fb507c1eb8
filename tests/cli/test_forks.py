# SPDX-License-Identifier: Apache-2.0
"""Workers of a fork server: each is what it would be if it were executed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.cli.launch.spawn import output_files
from paceline_plugins.zero.forks import ZERO_LINES, ForkedWorker, ForkServer, fork_server

pytestmark = pytest.mark.processes
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with fork_server({"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "2"}) as server:
        assert server is not None
        yield server


def started(server: ForkServer, folder: Path, program: str, *arguments: str, **variables: str) -> ForkedWorker:
    """A worker that runs `program`, with output in `out` and `err`."""
    script = folder / "program.py"
    script.write_text(textwrap.dedent(program))
    with output_files(folder / "out", folder / "err") as (out, err):
        return server.start([*ZERO_LINES, str(script), *arguments], {**os.environ, **variables}, out, err)


def first_on_path(folder: Path) -> str:
    """PYTHONPATH with `folder` before all others."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def test_a_worker_is_what_an_executed_one_is(server: ForkServer, tmp_path: Path) -> None:
    program = """
        import json, multiprocessing, os, signal, sys, threading, __main__
        print(json.dumps({
            "argv": sys.argv, "name": __name__, "main": __main__.__file__, "path": sys.path[0],
            "leader": os.getsid(0) == os.getpid(), "process": multiprocessing.current_process().name,
            "threads": threading.active_count(), "input": sys.stdin.read(), "orig": sys.orig_argv[1:],
            "signals": [str(signal.getsignal(one)) for one in (signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)],
            "variables": sorted(os.environ), "files": sorted(os.listdir("/proc/self/fd")), "mine": os.environ["MINE"]}))
    """
    assert started(server, tmp_path, program, "--rate", "1", MINE="yes").wait(DEADLINE_S) == 0
    found = json.loads((tmp_path / "out").read_text())
    script = str(tmp_path / "program.py")
    executed = subprocess.run(
        [*ZERO_LINES, script, "--rate", "1"],
        env={**os.environ, "MINE": "yes"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        start_new_session=True,
        check=True,
    )
    assert found == json.loads(executed.stdout) and (tmp_path / "err").read_bytes() == executed.stderr
    assert found["argv"] == [script, "--rate", "1"] and found["leader"] and found["process"] == "MainProcess"


def test_a_worker_can_be_signalled_as_soon_as_it_has_a_number(server: ForkServer, tmp_path: Path) -> None:
    worker = started(server, tmp_path, "import time; time.sleep(1000)")
    os.killpg(worker.pid, signal.SIGKILL)
    assert worker.wait(DEADLINE_S) == -signal.SIGKILL


@pytest.mark.slow
def test_where_a_library_starts_threads_workers_are_executed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()\n"
    )
    path = first_on_path(tmp_path)
    with fork_server({"PYTHONPATH": path}) as server:
        assert server is not None
        program = "import threading; print(threading.active_count())"
        assert started(server, tmp_path, program, PYTHONPATH=path).wait(DEADLINE_S) == 0
    assert (tmp_path / "out").read_text() == "2\n"  # the library's thread runs


def test_a_server_that_cannot_load_torch_says_so_on_each_worker(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')\n")
    with fork_server({"PYTHONPATH": first_on_path(tmp_path)}) as server:
        assert server is not None
        worker = started(server, tmp_path, "")
        assert worker.wait(DEADLINE_S) == 1
        with pytest.raises(ProcessLookupError):
            _ = worker.pid
        assert started(server, tmp_path, "").wait(DEADLINE_S) == 1
    assert "this torch is broken" in (tmp_path / "err").read_text()


@pytest.mark.slow  # tests/run has the same of executed ones
def test_workers_end_with_their_launcher(tmp_path: Path) -> None:
    launcher = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                from pathlib import Path
                from tests.cli.test_forks import started
                from paceline_plugins.zero.forks import fork_server
                with fork_server({{}}) as server:
                    worker = started(server, Path({str(tmp_path)!r}), "import time; time.sleep(1000)")
                    print(worker.pid, server._process.pid, flush=True)
                    worker.wait()
            """),
        ],
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    assert launcher.stdout is not None
    pids = [int(one) for one in launcher.stdout.readline().split()]
    processes = [psutil.Process(pid) for pid in pids]
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    _, alive = psutil.wait_procs(processes, timeout=DEADLINE_S)
    assert not alive


@pytest.mark.slow
def test_workers_draw_differently(server: ForkServer, tmp_path: Path) -> None:
    drawn = set()
    for _ in range(3):
        program = "import numpy, random; print(numpy.random.rand(), random.random())"
        assert started(server, tmp_path, program).wait(DEADLINE_S) == 0
        drawn |= set((tmp_path / "out").read_text().split())
    assert len(drawn) == 6
