# SPDX-License-Identifier: Apache-2.0
"""The examples of examples/clusters, on what there is of their clusters here: real processes, real launchers."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.communication import schedulers
from tests.communication.schedulers.environments import step
from tests.paths import python_path
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "clusters"
PROGRAM = str(EXAMPLES / "train.py")
WISHES = ["--epochs", "1", "--rule", "bmuf(period=4)"]
DEADLINE_S = 160.0

pytestmark = pytest.mark.processes


def environment(**more: str) -> dict[str, str]:
    """Of a process that no other launcher has started."""
    plain = {name: value for name, value in schedulers.alone(os.environ).items() if not name.startswith("PACELINE_")}
    return {**plain, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def finish(
    commands: list[list[str]], environments: list[dict[str, str]], folder: Path, deadline_s: float = DEADLINE_S
) -> str:
    """Run them side by side to their end; all that they said."""
    running = [
        subprocess.Popen(
            command, env=env, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )
        for command, env in zip(commands, environments, strict=True)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=deadline_s)[0] for process in running]
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its workers too, which hold the pipe
            process.communicate()
    assert [process.returncode for process in running] == [0] * len(running), "\n".join(said)
    return "\n".join(said)


def assert_trained(said: str, workers: int) -> None:
    for rank in range(workers):
        assert f"epoch 0, worker {rank} of {workers}" in said, said


@pytest.mark.skipif(
    shutil.which("mpiexec", path=str(Path(sys.executable).parent)) is None, reason="mpich is not installed"
)
def test_mpiexec_starts_the_workers(tmp_path: Path) -> None:
    mpiexec = str(Path(sys.executable).parent / "mpiexec")
    command = [mpiexec, "-n", "2", sys.executable, PROGRAM, *WISHES]
    assert_trained(finish([command], [environment()], tmp_path), 2)


def test_two_launchers_of_slurm_are_two_hosts(tmp_path: Path) -> None:
    """With the variables of `srun --ntasks-per-node=1` on two nodes, which here have one address."""
    launch = [sys.executable, "-m", "paceline", "run", "--workers", "1", "--timeout", "100", "--job", "job.pem"]
    steps = [step("127.0.0.[1,1]", 2, node) | {"SLURM_JOB_ID": str(os.getpid())} for node in range(2)]
    said = finish([[*launch, PROGRAM, "--", *WISHES]] * 2, [environment(**one) for one in steps], tmp_path)
    assert_trained(said, 2)
    logs = tmp_path / "paceline-logs" / f"slurm-{os.getpid()}.2"
    assert {path.name for path in logs.glob("rank-*.jsonl")} == {"rank-000.jsonl", "rank-001.jsonl"}


DISAGREE_FIRST = """
import os, runpy, sys
sys.argv = sys.argv[1:]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    sys.argv[-1] = "averaging"
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_two_agents_of_torchrun_and_a_restart(tmp_path: Path) -> None:
    """The workers meet, disagree on the rule and end; all start again, over the store where their addresses stand."""
    (tmp_path / "restarted.py").write_text(DISAGREE_FIRST)
    agent = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend"]
    agent += ["c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--max-restarts", "2", "--local-addr", "127.0.0.1"]
    said = finish([[*agent, str(tmp_path / "restarted.py"), PROGRAM, *WISHES]] * 2, [environment()] * 2, tmp_path)
    assert "runs the rule bmuf(period=4) and rank 1" in said
    assert_trained(said, 2)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("submitit") is None, reason="submitit is not installed")
def test_submitit_here(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "on_submitit.py"), "--local", "--tasks", "2", "--folder", "jobs"]
    said = finish([command], [environment()], tmp_path)
    assert said.count("one of 2 workers ended with a loss of") == 2


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.timeout(400)  # a cluster of Ray has a dozen processes of Python
def test_ray_train_here(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLES / "on_ray.py"), "--workers", "2", "--storage", "results"]
    more = {"HOME": str(tmp_path), "PACELINE_LOG": str(tmp_path / "logs"), "RAY_USAGE_STATS_ENABLED": "0"}
    finish([command], [environment(**more, RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S="300")], tmp_path, 380.0)
    assert len(list((tmp_path / "logs").glob("rank-*.jsonl"))) == 2  # what they printed may come after Ray's own end
