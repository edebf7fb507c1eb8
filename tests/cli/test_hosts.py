# SPDX-License-Identifier: Apache-2.0
"""`paceline run` on the clusters of others: what it finds, what it refuses, and `--print`, which starts nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from tests.communication.schedulers.environments import batch, step

pytestmark = pytest.mark.plugins

PROGRAM = "train.py"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    (tmp_path / PROGRAM).write_text("raise SystemExit('never')")


def shown(*arguments: object, **variables: str) -> Result:
    """`paceline run --print` with these variables; it starts nothing and makes nothing."""
    found = CliRunner(env=variables).invoke(app, ["run", "--print", *map(str, arguments)])
    assert [path.name for path in Path().iterdir()] == [PROGRAM]
    return found


def workers(said: str) -> list[dict[str, str]]:
    """The environment of each worker that was printed."""
    parts = [part.splitlines() for part in said.split("\n\n") if part.startswith("worker ")]
    return [dict(line.strip().split("=", 1) for line in part[2:] if "=" in line) for part in parts]


def test_one_host() -> None:
    found = shown("--workers", 2, "--rule", "bmuf(period=4)", "--log", "logs", PROGRAM, "--", "--lr", "0.1")
    assert found.exit_code == 0, found.output
    one, two = workers(found.stdout)
    assert (one["RANK"], two["RANK"], two["LOCAL_RANK"], two["WORLD_SIZE"]) == ("0", "1", "1", "2")
    assert one["PACELINE_RULE"] == "bmuf(period=4)" and one["MASTER_ADDR"] == "127.0.0.1"
    assert one["PACELINE_LOG"] == str(Path("logs").absolute())
    assert one["PACELINE_TLS"] == str(Path("logs/certificates/host-0/rank-0").absolute())
    assert f"-u {PROGRAM} --lr 0.1" in found.stdout and "other hosts" not in found.stdout


def test_several_hosts_are_told_what_to_type() -> None:
    found = shown("--workers", 2, "--hosts", 3, "--host-index", 1, "--master", "10.0.0.1:4000", "--open", PROGRAM, "-x")
    assert found.exit_code == 0, found.output
    assert [one["RANK"] for one in workers(found.stdout)] == ["2", "3"]
    assert [one["GROUP_RANK"] for one in workers(found.stdout)] == ["1", "1"]
    lines = [line.strip() for line in found.stdout.splitlines() if line.strip().startswith("paceline run")]
    common = "paceline run --workers 2 --hosts 3 --master 10.0.0.1:4000 --open --host-index"
    assert lines == [f"{common} 0 {PROGRAM} -x", f"{common} 2 {PROGRAM} -x"]


def test_the_other_hosts_need_the_secret_that_host_0_makes() -> None:
    found = shown("--hosts", 2, "--master", "10.0.0.1:4000", "--log", "logs", PROGRAM)
    assert "scp logs/certificates/job.pem HOST:job.pem" in found.stdout
    assert f"--host-index 1 --job job.pem {PROGRAM}" in found.stdout


def test_an_elastic_run() -> None:
    found = shown("--elastic", "2:8", "--workers", 2, "--listen", "10.0.0.1:4000", "--open", PROGRAM)
    assert found.exit_code == 0, found.output
    assert [(one["LOCAL_RANK"], one["PACELINE_CONTROL"]) for one in workers(found.stdout)] == [
        ("0", "10.0.0.1:4000"),
        ("1", "10.0.0.1:4000"),
    ]
    assert f"paceline run --join 10.0.0.1:4000 --open --workers N {PROGRAM}" in found.stdout
    joins = shown("--join", "10.0.0.1:4000", "--open", PROGRAM)  # no process listens there, and no worker is asked
    assert joins.exit_code == 0 and "the control plane listens at 10.0.0.1:4000" in joins.stdout


@pytest.mark.parametrize(
    ("arguments", "variables", "says"),
    [
        ([], batch("a[1-2]", 2), "not started by srun"),
        ([], step("a[1-2]", 2, 0, 4), "has 4 tasks on a node"),
        (["--hosts", 3], step("a[1-2]", 2, 0), "--hosts 3, but Slurm job 1234, step 2 has 2"),
        (["--host-index", 0], step("a[1-2]", 2, 1), "--host-index 0, but Slurm job 1234, step 2 says 1"),
        (["--elastic", "2:8"], step("a[1-2]", 2, 0), "--elastic leads a run from one host"),
        (["--hosts", 2], {"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "x"}, "or pods a headless Service"),
        (["--workers", 0], step("a[1-2]", 2, 0), "--workers must be at least 1, got 0"),
        (["--hosts", 2], {"JOB_COMPLETION_INDEX": "2", "MASTER_ADDR": "a"}, "--host-index must lie in 0..1"),
    ],
)
def test_contradictions_are_refused(
    monkeypatch: pytest.MonkeyPatch, arguments: list[object], variables: dict[str, str], says: str
) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "lonely")
    found = shown(*arguments, PROGRAM, **variables)
    assert found.exit_code == 2 and says in found.stderr
