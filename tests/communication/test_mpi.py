# SPDX-License-Identifier: Apache-2.0
"""What the transport over MPI refuses before any process of MPI is needed."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import paceline
from paceline.cli import app
from paceline.communication import connect, schedulers
from paceline.core.lazy import MissingExtraError
from paceline.errors import UnsupportedError
from paceline_plugins.mpi import library, meeting

SOON = 10.0
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "7", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "4"}


class Communicator:
    """COMM_WORLD of a process that is alone for MPI."""

    def Get_size(self) -> int:
        return 1

    def Get_rank(self) -> int:
        return 0


class Mpi:
    """As much of `mpi4py.MPI` as these tests need."""

    THREAD_SINGLE, THREAD_FUNNELED, THREAD_SERIALIZED, THREAD_MULTIPLE = range(4)
    COMM_WORLD = Communicator()
    finalized, initialized, level, main = False, True, THREAD_MULTIPLE, True

    def Is_finalized(self) -> bool:
        return self.finalized

    def Is_initialized(self) -> bool:
        return self.initialized

    def Query_thread(self) -> int:
        return self.level

    def Is_thread_main(self) -> bool:
        return self.main

    def Get_library_version(self) -> str:
        return "MPICH Version:\t5.0\nmore\0"


@pytest.fixture
def mpi(monkeypatch: pytest.MonkeyPatch) -> Mpi:
    """An mpi4py whose MPI has one process."""
    package: Any = types.ModuleType("mpi4py")
    package.MPI = made = Mpi()
    monkeypatch.setitem(sys.modules, "mpi4py", package)
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", made)  # type: ignore[arg-type]
    return made


def test_without_mpi4py_the_user_reads_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingExtraError, match=r"needs mpi4py, which is .*: pip install 'paceline\[mpi\]'"):
        connect(SOON, None, "mpi")


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"finalized": True}, r"MPI has ended in this process"),
        ({"initialized": False}, r"call MPI.Init_thread\(\) before attach"),
        ({"level": Mpi.THREAD_FUNNELED, "main": False}, "started with MPI_THREAD_FUNNELED, so only the thread"),
    ],
)
def test_an_mpi_that_cannot_be_called(mpi: Mpi, state: dict[str, Any], says: str) -> None:
    for name, value in state.items():
        setattr(mpi, name, value)
    with pytest.raises(UnsupportedError, match=says):
        library.load(SOON)


@pytest.mark.parametrize(
    "launcher",
    [
        {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_NAMESPACE": "n"},
        {"PMI_RANK": "1", "PMI_SIZE": "4", "PMI_FD": "7"},
    ],
)
def test_a_launcher_that_is_not_of_this_mpi(
    mpi: Mpi, launcher: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of four workers would train alone."""
    for name, value in {**launcher, "PACELINE_TRANSPORT": "mpi"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        UnsupportedError, match=r"as rank 1 of 4, and MPI \(MPICH Version: 5.0\) counts it as rank 0 of 1"
    ):
        meeting.meet(SOON)


def test_hosts_with_different_mpis(mpi: Mpi, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["a\nMPICH Version: 5.0", "b\nMPICH Version: 4.1", "a\nMPICH Version: 5.0"]
    monkeypatch.setattr(meeting, "gathered", lambda *_: said)
    job: Any = types.SimpleNamespace(mpi=mpi, world=paceline.World(2, 3))
    with pytest.raises(UnsupportedError, match=r"rank 0 on a has 'MPICH Version: 5.0' and rank 1 on b has .*4.1"):
        meeting._world(job, SOON)
    said[1] = "b\nMPICH Version: 5.0"
    world = meeting._world(job, SOON)
    assert (world.hosts, world.local_rank, world.local_size) == (("a", "b", "a"), 1, 2)


@pytest.mark.parametrize(
    ("options", "environment", "says"),
    [
        ("--transport mpi", {}, "let MPI start the workers, mpiexec -n 4 paceline run"),
        ("--transport mpi --workers 2", HYDRA, "no --workers"),
        ("--transport pigeon", {}, "--transport must be one of auto, channel, mpi, got 'pigeon'"),
        ("--transport mpi --elastic 1:2", {}, "elastic runs have connections of their own"),
        ("--restarts 2", HYDRA, "--restarts is for commands that start the workers"),
        ("--rule asgd", HYDRA, "opens connections of its own"),
        ("--job file", HYDRA, "--job is for launchers that make certificates"),
    ],
)
def test_options_that_do_not_go_with_mpi(
    options: str, environment: dict[str, str], says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.chdir(tmp_path)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    Path("train.py").write_text("import paceline")
    found = CliRunner().invoke(app, ["run", *options.split(), "train.py"])
    assert found.exit_code == 2 and says in found.stderr, found.output


def test_which_processes_mpi_started() -> None:
    hydra = HYDRA
    found = schedulers.mpi_process(hydra)
    assert found is not None and (found.rank, found.size, found.local_size) == (1, 4, 4)
    apart = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    other = schedulers.mpi_process(apart)
    assert other is not None and other.master is None  # several hosts, and no address is needed
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    assert schedulers.mpi_process({**hydra, **torchrun}) is None
    assert schedulers.mpi_process({}) is None and schedulers.mpi_process({**hydra, "PMI_SIZE": "1"}) is None
