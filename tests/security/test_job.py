# SPDX-License-Identifier: Apache-2.0
"""The certificates that `paceline run` makes by itself, and how another host of the job comes to its own."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.run import certificates
from paceline.communication.sockets.channel import TLS
from tests.communication.connections import pair
from tests.helpers import attached
from tests.paths import python_path

MASTER = ("127.0.0.1", 29500)
SECRET = b"BEGIN PRIVATE KEY"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("PYTHONPATH", python_path())  # for the workers
    monkeypatch.delenv("PACELINE_TLS", raising=False)


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["run", *map(str, arguments)])


def secrets(folder: Path) -> list[str]:
    """Every file with a private key below `folder`; each is its owner's alone."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and SECRET in path.read_bytes()]
    assert all(stat.S_IMODE(path.stat().st_mode) == 0o600 for path in found)
    return [str(path.relative_to(folder)) for path in found]


def together(one: Path | None, other: Path | None) -> bool:
    """Whether the workers of two hosts understand each other."""
    assert one is not None and other is not None
    first, second = TLS.folder(one), TLS.folder(other)
    with pair(TLS(first.certificate, first.key, second.authority)) as (near, far):
        near.send(1, (5,))
        return far.receive(deadline_s=30.0).numbers[0] == 5


@pytest.mark.processes
def test_workers_have_a_certificate_and_not_the_jobs_secret(tmp_path: Path) -> None:
    """On one host the authority's key is written nowhere: nobody can be let in any more."""
    (tmp_path / "train.py").write_text(
        "import os\nfor name, value in os.environ.items():\n    assert 'PRIVATE KEY' not in value\n"
        "place = os.environ['PACELINE_TLS']\n"
        "modes = [oct(os.stat(os.path.join(place, name)).st_mode)[-3:] for name in ('key.pem', '../..')]\n"
        "print('tls', place, sorted(os.listdir(place)), *modes)\n"
    )
    result = run("--workers", 2, "--as-is", "--log", "log", "train.py")
    assert result.exit_code == 0, result.output
    folder = tmp_path / "log" / "certificates" / "host-0"
    for rank in range(2):
        assert result.stdout.count(f"tls {folder}/rank-{rank} ['ca.pem', 'cert.pem', 'key.pem'] 600 700\n") == 1
    assert secrets(tmp_path) == [] and not (tmp_path / "log" / "certificates").exists(), (
        "they are gone after a good end"
    )
    assert "job" not in result.stderr


def test_no_folder_is_no_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TLS", "")
    with attached(torch.nn.Linear(1, 1), "asgd", lr=0.1) as (run_, *_):
        assert run_._context.settings.tls is None


def test_one_worker_needs_none_and_what_is_named_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificates.for_workers(LaunchCluster(1), tmp_path, None, True) is None
    monkeypatch.setenv("PACELINE_TLS", "mine")
    assert certificates.for_workers(LaunchCluster(4), tmp_path, None, True) is None
    assert list(tmp_path.iterdir()) == []


def test_another_host_joins_with_the_jobs_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first = certificates.for_workers(LaunchCluster(1, 2, 0, MASTER), tmp_path / "a", None, True)
    assert "scp a/certificates/job.pem HOST:job.pem, and there --job job.pem" in capsys.readouterr().err
    assert secrets(tmp_path) == ["a/certificates/job.pem"]
    second = certificates.for_workers(
        LaunchCluster(1, 2, 1, MASTER), tmp_path / "b", tmp_path / "a/certificates/job.pem", True
    )
    assert first is not None and second is not None
    zero, one = first(0)["PACELINE_TLS"], second(1)["PACELINE_TLS"]
    assert together(Path(zero), Path(one)) and together(Path(one), Path(zero))
    assert secrets(tmp_path / "b") == ["certificates/host-1/rank-1/key.pem"]


def test_hosts_that_share_a_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All name one file, which host 0 makes; where it is there it is taken, and never replaced."""
    job = tmp_path / "job.pem"
    first = certificates.for_workers(LaunchCluster(1, 2, 0, MASTER), tmp_path, job, False)
    made = job.read_bytes()
    again = certificates.for_workers(LaunchCluster(1, 2, 0, MASTER), tmp_path, job, False)
    second = certificates.for_workers(LaunchCluster(1, 2, 1, MASTER), tmp_path, job, False)
    assert first is not None and again is not None and second is not None
    zero, one = again(0)["PACELINE_TLS"], second(1)["PACELINE_TLS"]
    assert job.read_bytes() == made and together(Path(zero), Path(one)) and first.folder == again.folder
    assert capsys.readouterr().err == ""


def test_another_host_without_the_file_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert certificates.for_workers(LaunchCluster(1, 2, 1, MASTER), tmp_path, None, True) is None
    assert "copy certificates/job.pem of host 0, then --job job.pem; or give --open" in capsys.readouterr().err
    with pytest.raises(typer.Exit):
        certificates.for_workers(LaunchCluster(1, 2, 1, MASTER, 0.2), tmp_path, tmp_path / "job.pem", True)
    said = " ".join(capsys.readouterr().err.split())
    assert "waiting for job.pem, which host 0 makes" in said and "cannot be used as a job's file" in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--open", "--tls", "folder"], "--tls and --open exclude each other"),
        (["--open", "--job", "job.pem"], "--job and --open exclude each other"),
        (["--tls", "nowhere"], "--tls: no cert.pem, key.pem, ca.pem in nowhere"),
    ],
)
def test_wishes_that_exclude_each_other(tmp_path: Path, arguments: list[str], says: str) -> None:
    (tmp_path / "train.py").write_text("print('never')")
    result = run(*arguments, "train.py")
    assert result.exit_code == 2 and says in result.stderr and "never" not in result.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.processes
def test_open_is_in_the_clear_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the launcher's own environment names certificates."""
    monkeypatch.setenv("PACELINE_TLS", "of somebody else")
    (tmp_path / "train.py").write_text("import os\nprint([os.environ['PACELINE_TLS']])\n")
    result = run("--workers", 2, "--open", "--as-is", "--log", "log", "train.py")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("['']") == 2 and not (tmp_path / "log" / "certificates").exists()
    assert "--open: the workers' connections are neither encrypted" in result.stderr
