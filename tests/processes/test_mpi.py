# SPDX-License-Identifier: Apache-2.0
"""`transport="mpi"` on real processes of mpiexec: what virtual workers give, and who is named when a process fails."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.communication.virtual.transport import VirtualTransport
from paceline.update.engine.blocks import outer_state
from tests.nursery import surroundings
from tests.processes.programs import SMALL
from tests.processes.route_programs import operations, parts
from tests.processes.test_gloo import check_table
from tests.processes.test_routes import imitate

MPIEXEC = Path(sys.executable).parent / "mpiexec"
DEADLINE_S = 170.0

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None or not MPIEXEC.exists(), reason="there is no MPI"),
]


def mpiexec(workers: int, command: list[str], folder: Path, **more: str) -> tuple[int, str]:
    """The exit code, and all that the processes said."""
    launcher = subprocess.Popen(
        [str(MPIEXEC), "-n", str(workers), *command],
        env={**surroundings(), **more}, cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        said = launcher.communicate(timeout=DEADLINE_S)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.communicate()
    return launcher.returncode, said


def program(name: str, workers: int, folder: Path) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.processes.mpi_programs", name, str(folder)]
    return mpiexec(workers, command, folder, PACELINE_TRANSPORT="mpi")


def test_the_laws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations, bytes and every rule family as on virtual workers, in one launch."""
    code, out = program("laws", 4, tmp_path)
    assert code == 0, out
    said = [json.loads((tmp_path / f"said.{rank}").read_text()) for rank in range(4)]
    everybody = imitate(4, operations)
    assert [s["all"] for s in said] == everybody == [s["channel"] for s in said]
    assert [s["parts"] for s in said] == imitate(4, parts)
    for rank, s in enumerate(said):
        assert s["threads"] == [*(4.0 * sum(number + k for number in range(20)) for k in range(6)), 6 * 20 * 6 * 1000]
        sums = [4.0 * k + 6 for k in range(7)]
        assert all(s["dtypes"].pop(str(dtype)) == sums for dtype in DTYPES)
        assert s["dtypes"] == {
            "transposed": [4.0 * k + 6 for k in torch.arange(12).view(3, 4).t().flatten().tolist()],
            "complex": [6.0, 6.0],
            "gathered": [float(rank) for rank in range(4) for _ in range(3)],
            "flags": [1.0, 1.0],
        }
        assert s["orders"] == [0.0, 4.0, 8.0, 12.0, 16.0]
        assert s["forked"] == 7, "and the parent's MPI works on"
        assert len(s["closed"]) == 3 and all("was closed before" in text for text in s["closed"])
        assert len(s["refused"]) == 1 + (rank == 1) and "different channels or parts" in s["refused"][-1]
    assert "8 bytes arrived, 12 were expected" in said[1]["refused"][0]
    for name in ("SMALL_ELEMENTS", "SMALL_CODED"):
        monkeypatch.setattr(outer_state, name, SMALL)
    monkeypatch.setattr(VirtualTransport, "coarse", 1)
    check_table(tmp_path, 4, hosts=0)


DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int16, torch.uint8)


@pytest.mark.slow
def test_a_worker_that_hangs_is_named(tmp_path: Path) -> None:
    code, out = program("hang", 3, tmp_path)
    assert code != 0, out
    for rank in (0, 2):
        said = (tmp_path / f"error.{rank}").read_text()
        assert re.search(r"operation \d+ \(all_reduce, deadline 3 s\) failed: rank 1 on \S+ did not come", said), said
        assert "mpi_programs.py" in said.split("rank 1 on")[2], "the table says where it is"
        assert "An MPI job cannot continue after this" in said
        assert "failed before" in (tmp_path / f"again.{rank}").read_text()


@pytest.mark.slow
def test_a_worker_that_does_not_come_to_attach(tmp_path: Path) -> None:
    code, out = program("late", 2, tmp_path)
    assert code == 1 and re.search(r"MPI_Init did not return within 2 s \[rank 0 on \S+\]: not all processes", out), out


def test_a_worker_that_raises_ends_the_job(tmp_path: Path) -> None:
    """Long before the deadline of a minute, and the others say who."""
    code, out = program("raises", 3, tmp_path)
    assert code == 1 and "of the user" in out, out
    for rank in (0, 2):
        said = (tmp_path / f"error.{rank}").read_text()
        assert re.search(r"failed: rank 1 on \S+ did not come", said), said
        assert "at its end, after KeyError" in said


@pytest.mark.slow  # a worker that raises does
def test_a_killed_worker_ends_the_job(tmp_path: Path) -> None:
    """By mpiexec, long before the deadline of a minute; `paceline run` says which worker it was."""
    code, out = program("killed", 3, tmp_path)
    assert code == 9 and "Killed (signal 9)" in out, (code, out)
    (tmp_path / "train.py").write_text(KILLED)
    code, out = mpiexec(2, [sys.executable, "-m", "paceline", "run", "--transport", "mpi", "train.py"], tmp_path)
    assert code in (137, 9), "of the worker, or of those that mpiexec killed then"
    assert re.search(r"worker 1 on \S+: killed by SIGKILL", out), out


KILLED = """
import os, signal, torch, paceline
model = torch.nn.Linear(1, 1)
run = paceline.attach(model, torch.optim.SGD(model.parameters()), timeout_s=60)
if run.world.rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
run.messages.barrier()
"""


def test_a_program_with_an_mpi_of_its_own(tmp_path: Path) -> None:
    code, out = program("levels", 2, tmp_path)
    assert code == 0, out
    for rank in range(2):
        said = json.loads((tmp_path / f"said.{rank}").read_text())
        background, threads, total, errors, message, again, finalized = said
        assert (background, threads, total, again) == (False, False, 3.0, 6.0)
        assert len(errors) == 1 and "started with MPI_THREAD_SERIALIZED" in errors[0]
        assert message == "a message of the program" and not finalized


UNCHANGED = """
import torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
x = torch.randn(64, 3)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4, shuffle=True)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps = 0
for epoch in range(2):
    for a, b in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(a), b).backward()
        optimizer.step()
        steps += 1
torch.save(model.state_dict(), "model.pt")
print("trained", steps)
"""


@pytest.mark.slow
def test_paceline_run_under_mpiexec_with_zero_lines(tmp_path: Path) -> None:
    """An unchanged program; a program that nothing shares, whose work is not done twice without a word."""
    (tmp_path / "train.py").write_text(UNCHANGED)
    run = [sys.executable, "-m", "paceline", "run", "--transport", "mpi"]
    code, out = mpiexec(2, [*run, "--log", "logs", "--rule", "sync", "train.py"], tmp_path)
    assert code == 0 and out.count("trained 16") == 1, out
    assert {path.name for path in (tmp_path / "logs").glob("*.jsonl")} == {"rank-000.jsonl", "rank-001.jsonl"}
    assert '"transport": "mpi"' in (tmp_path / "logs" / "rank-000.jsonl").read_text()
    assert (tmp_path / "model.pt").exists()
    (tmp_path / "alone.py").write_text("print('done')")
    code, out = mpiexec(2, [*run, "alone.py"], tmp_path)
    assert code == 1 and "the work was not shared" in out, out
