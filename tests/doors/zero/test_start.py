# SPDX-License-Identifier: Apache-2.0
"""What a program meets when it begins is the same on all workers, whichever of them is the first."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest
from torch.distributed import HashStore

from paceline.communication.torch import rendezvous
from paceline_plugins.zero.rank_discovery import ZeroWorker, start
from tests.doors.zero.programs import each, virtual
from tests.doors.zero.test_run import paceline_run
from tests.ports import free_port

TRAINING = """
import torch
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x in torch.utils.data.DataLoader(torch.ones(12, 1), batch_size=2):
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
with open("seen.json", "w") as file:
    json.dump(seen, file)
for one in globals().get("opened", ()):
    one.close()
"""
HEAD = "import json, os, pathlib, shutil, socket, sqlite3, tempfile, time, uuid\n"

ALIKE = {
    "a new folder": 'os.makedirs("out"); seen = os.path.exists("out/log")',
    "whether to resume": """
        seen = os.path.exists("last.pt")
        pathlib.Path("last.pt").write_text("epoch 0")
    """,
    "whether a file can be read": """
        try:
            seen = open("state.json").read()
        except FileNotFoundError:
            seen = None
            pathlib.Path("state.json").write_text("{}")
    """,
    "a number of runs": """
        seen = len(os.listdir("runs"))
        os.makedirs(f"runs/{seen}")
        open(f"runs/{seen}/log", "x").close()
    """,
    "a counter in a file": """
        seen = int(pathlib.Path("counter").read_text())
        pathlib.Path("counter").write_text(str(seen + 1))
    """,
    "lines of a file": """
        with open("counter", "a+") as file:
            file.write("again")
            file.seek(0)
            seen = file.read()
    """,
    "a database": """
        base = sqlite3.connect("runs.db")
        base.execute("insert into runs values (1)")
        base.commit()
        seen = base.execute("select count(*) from runs").fetchone()[0]
        base.close()
    """,
    "a folder that is cleared": """
        seen = sorted(os.listdir("old"))
        shutil.rmtree("old")
        os.makedirs("old")
        seen += os.listdir("old")
    """,
    "a file that is moved": """
        seen = [os.path.exists("counter"), os.path.exists("counter.old")]
        os.rename("counter", "counter.old")
        seen += [os.path.exists("counter"), pathlib.Path("counter.old").read_text()]
    """,
    "a link to the latest": """
        seen = os.readlink("latest")
        os.remove("latest")
        os.symlink("runs/0", "latest")
        seen += os.path.realpath("latest")
    """,
    "a lock": 'os.close(os.open("lock", os.O_CREAT | os.O_EXCL)); seen = os.path.exists("lock")',
    "a port": """
        server = socket.create_server(("127.0.0.1", PORT))
        client = socket.create_connection(("127.0.0.1", PORT))
        there, _ = server.accept()
        there.sendall(b"own")
        seen = client.recv(3).decode()
        opened = client, there, server
    """,
    "the launcher's variables": 'seen = [name for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK") if name in os.environ]',
}
"""What all workers see alike, and as the program alone would."""
OWN = {
    "a name of the time": 'name = f"runs/{time.time_ns()}"',
    "a name at random": 'name = f"runs/{uuid.uuid4()}"',
    "a name of the process": 'name = f"runs/{os.getpid()}-{socket.gethostname()}"',
    "a temporary name": 'name = tempfile.mkdtemp(dir="runs"); os.rmdir(name)',
}
"""Names that differ between workers, each of which has its own files below."""


def _old_files(folder: Path) -> None:
    import sqlite3

    (folder / "runs" / "0").mkdir(parents=True)
    (folder / "old").mkdir()
    (folder / "old" / "log.txt").write_text("of an earlier run")
    (folder / "latest").symlink_to("old")
    (folder / "counter").write_text("7")
    base = sqlite3.connect(folder / "runs.db")
    base.execute("create table runs (n)")
    base.commit()
    base.close()


def _seen(folder: Path, workers: int) -> list[object]:
    return [json.loads(path.read_text()) for path in each(folder, "seen.json", workers)]


@pytest.mark.parametrize("what", ALIKE)
def test_all_workers_see_the_same(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = HEAD + textwrap.dedent(ALIKE[what]).replace("PORT", str(free_port())) + TRAINING
    found = []
    for name, workers in (("alone", 1), ("together", 3)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        _old_files(tmp_path / name)
        virtual(tmp_path / name, source, workers=workers)
        found += _seen(tmp_path / name, workers)
    texts = [str(one).replace("/alone/", "/together/") for one in found]
    assert len(texts) == 4 and len(set(texts)) == 1


@pytest.mark.parametrize("what", OWN)
def test_names_of_a_workers_own_lead_to_its_own_files(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = f"""
        {OWN[what]}
        os.makedirs(name)
        pathlib.Path(name, "log.txt").write_text("mine")
        seen = [os.listdir("runs") == [os.path.basename(name)], os.listdir(name)]
    """
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    virtual(tmp_path, HEAD + textwrap.dedent(source) + TRAINING)
    assert _seen(tmp_path, 2) == [[True, ["log.txt"]]] * 2
    assert len([path for path in (tmp_path / "runs").iterdir()]) == 1


def test_workers_agree_when_the_job_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    first, second = ZeroWorker(0, 2, 0, tmp_path / "0", False), ZeroWorker(1, 2, 1, tmp_path / "1", False)
    given = {**variables, "PACELINE_BEGAN": "5.5"}
    assert start(first, given) == (5.5, tmp_path / "0")  # by `paceline run`
    store = HashStore()
    monkeypatch.setattr(rendezvous, "shares_store", lambda: True)
    monkeypatch.setattr(rendezvous, "fresh_store", lambda worker, timeout: store)
    one, other = start(first, variables), start(second, variables)  # by torchrun, on two hosts
    assert one == other and one[1] == tmp_path / "0"
    monkeypatch.setattr(rendezvous, "shares_store", lambda: False)
    assert start(second, variables)[1] == tmp_path / "1"  # by hand


@pytest.mark.slow  # test_run.py compares their models
@pytest.mark.processes
def test_real_workers_see_the_same(tmp_path: Path) -> None:
    """Each begins later than the one before it, and rank 0 is the first."""
    first = """
        seen = [os.path.exists("out"), sorted(os.listdir(".")), dict(os.environ)]
        os.makedirs("out")
    """
    done = paceline_run(tmp_path, HEAD + textwrap.dedent(first) + TRAINING, "--workers", "3")
    assert done.returncode == 0, done.stderr
    one, *others = _seen(tmp_path, 3)
    for other in others:
        assert other[:2] == one[:2]
        assert {name for name in one[2] | other[2] if one[2].get(name) != other[2].get(name)} == {"PACELINE_TLS"}
