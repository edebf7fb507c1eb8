# SPDX-License-Identifier: Apache-2.0
"""`paceline.launch`: a function in several processes, from scripts, a REPL and a notebook."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import paceline
from paceline.errors import UnsupportedError, WorkerFailedError
from tests.run import launch_programs as programs
from tests.waiting import alive, until

ROOT = Path(__file__).parents[2]
DEADLINE_S = 120.0

pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs belong into the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.processes
def test_a_function_trains_in_processes_and_returns_each_result(capfd: pytest.CaptureFixture[str]) -> None:
    assert paceline.launch(programs.train, 2, (0.1,), rule="averaging") == [(0, -0.2), (1, -0.2)]
    said = capfd.readouterr()
    assert "the rule is averaging, and this function came by name" in said.out
    assert "starting 2 workers of train" in said.err


@pytest.mark.processes
@pytest.mark.parametrize(
    ("target", "message"),
    [
        (programs.fail_on_one, "rank 1 of 2 failed: KeyError: 'no such layer'\n\nIn the worker:\n"),
        (
            programs.lock,
            "of 2 failed: paceline.errors.UnsupportedError: the function's result, lock, cannot be given back",
        ),
        (programs.nested, "launch was called inside a worker of launch"),
        (programs.leave, "rank 0 of 2 returned nothing"),
        (programs.kill_one, "the workers ended with exit code 137"),
    ],
)
def test_a_worker_that_fails_is_an_error_with_its_traceback(target: Callable[[], Any], message: str) -> None:
    with pytest.raises(WorkerFailedError) as caught:
        paceline.launch(target, 2, as_is=True, quiet=True)
    assert message in str(caught.value)
    if target is programs.fail_on_one:
        assert 'raise KeyError("no such layer")' in str(caught.value) and "launch.py" not in str(caught.value)


@pytest.mark.slow  # tests/run has the same with virtual workers
@pytest.mark.processes
def test_work_that_was_not_shared_is_an_error_unless_asked_for(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(WorkerFailedError, match="exit code 1"):
        paceline.launch(programs.rank, 2)
    assert "nothing attached paceline" in capfd.readouterr().err
    assert paceline.launch(programs.rank, 2, as_is=True) == [0, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("train.py", 2), "launch calls a function, and got 'train.py'"),
        ((programs.train, 0), "workers is a number of processes, at least 1, got 0"),
        ((programs.train, True), "at least 1, got True"),
        ((programs.train, "2"), "at least 1, got '2'"),
        ((programs.train, 2, (threading.Lock(),)), "train, what it uses, or an argument cannot be sent"),
        (((one for one in ()).__next__, 2), "__next__, what it uses, or an argument cannot be sent"),
    ],
)
def test_what_cannot_be_launched_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        paceline.launch(*arguments)


@pytest.mark.slow  # test_a_function_trains_in_processes starts the same processes
@pytest.mark.processes
@pytest.mark.parametrize("way", ["script", "repl"])
def test_a_function_of_the_program_itself_needs_no_guard(way: str, tmp_path: Path) -> None:
    source = (ROOT / "tests" / "run" / "launch_programs.py").read_text()
    source += '\nprint("results", paceline.launch(train, 2, (0.1,), rule="averaging"))\n'
    if way == "script":
        (tmp_path / "program.py").write_text(source)
        command, given = [sys.executable, "program.py"], ""
    else:
        command, given = [sys.executable, "-i"], f"exec({source!r})\n"
    ended = subprocess.run(command, input=given, capture_output=True, text=True, timeout=DEADLINE_S)
    assert "results [(0, -0.2), (1, -0.2)]" in ended.stdout, ended.stderr
    assert "came by value" in ended.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_program(how: signal.Signals, tmp_path: Path) -> None:
    program = (
        "import paceline, pathlib, signal\nfrom tests.run import launch_programs\n"
        # A shell that runs the tests in the background has it ignored.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"paceline.launch(launch_programs.wait_for_ever, 2, (pathlib.Path({str(tmp_path)!r}),), as_is=True)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    started = subprocess.Popen([sys.executable, "-c", program], env=environment, stderr=subprocess.PIPE, text=True)
    try:
        until(lambda: len(list(tmp_path.glob("worker-*"))) == 2 or started.poll() is not None)
        workers = [int(path.name.removeprefix("worker-")) for path in tmp_path.glob("worker-*")]
        assert len(workers) == 2 and all(alive(pid) for pid in workers)
        started.send_signal(how)
        said = started.communicate(timeout=DEADLINE_S)[1]
        until(lambda: not any(alive(pid) for pid in workers))
        assert how is signal.SIGKILL or "KeyboardInterrupt" in said
    finally:
        started.kill()
        started.communicate()


@pytest.mark.full
@pytest.mark.processes
def test_a_notebook_launches_its_own_function() -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    function = "def double(number):\n    import os\n    print('in', os.environ['RANK'])\n    return number * factor"
    cells = ["import paceline\nfactor = 3", function, "paceline.launch(double, 2, (7,), as_is=True, quiet=True)"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=int(DEADLINE_S), kernel_name="python3").execute()
    outputs = notebook.cells[-1].outputs
    assert any("in 1" in one.get("text", "") for one in outputs), outputs
    assert outputs[-1]["data"]["text/plain"] == "[21, 21]"
