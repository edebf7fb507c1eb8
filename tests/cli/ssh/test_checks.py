# SPDX-License-Identifier: Apache-2.0
"""The check before the start, over the `ssh` of `fake_ssh.py`: every trouble of every host in one list."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.cli.run import checks
from paceline_plugins.ssh import client
from tests.cli.ssh import fake_ssh
from tests.paths import python_path

pytestmark = pytest.mark.processes
PROGRAM = "train.py"


class Cluster:
    """Hosts of the fake ssh, and the folder from which the command is typed."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.here = folder / "hosts", folder / "here"
        self.here.mkdir()
        for name, value in fake_ssh.install(self.folder, "a", "b", "c").items():
            monkeypatch.setenv(name, value)
        for name in "abc":
            self.host(name, environment=f"PYTHONPATH={python_path()}\nOMP_NUM_THREADS=1")
        monkeypatch.chdir(self.here)
        monkeypatch.setenv("COLUMNS", "600")
        (self.here / PROGRAM).write_text("import paceline\nrun = paceline.attach(model, optimizer)")

    def host(self, name: str, **files: str) -> Path:
        """Write files of a host."""
        for file, text in files.items():
            (self.folder / name / file).write_text(text)
        return self.folder / name

    def settings(self, text: str) -> None:
        (self.here / "paceline.toml").write_text(text)

    def call(self, *arguments: object) -> Result:
        found = CliRunner().invoke(app, ["run", *map(str, arguments)])
        jobs = [path for name in "abc" for path in (self.folder / name).glob(".cache/paceline/jobs/*")]
        assert not jobs and not (self.here / "paceline-logs").exists(), "something was started"
        return found


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def refused(found: Result, *texts: str) -> None:
    assert found.exit_code == 2, found.output
    for text in texts:
        assert text in found.stderr, found.stderr


def test_all_troubles_of_all_hosts_are_in_one_list(cluster: Cluster) -> None:
    cluster.host("a", said="root@a: Permission denied (publickey).")
    cluster.host("b", said="Host key verification failed.")
    found = cluster.call("--hosts", "a,b,nowhere,me@c", PROGRAM)
    refused(
        found,
        "3 of 4 hosts cannot take part; nothing was started",
        "a: it refuses this user's keys: ssh-copy-id a",
        "b: its host key is not known here: ssh b",
        "nowhere: this machine does not know the name",
    )
    assert "c:" not in found.stderr


def test_what_the_shell_prints_first_does_no_harm(cluster: Cluster) -> None:
    cluster.host("a", banner="Welcome to a\n{not json}")
    refused(cluster.call("--hosts", "a,nowhere", PROGRAM), "1 of 2 hosts")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("python = '/nowhere/python'", "a: it has no Python: install Python 3.10"),
        ("python = '/bin/false'", "a: ssh ended with 1: it said nothing"),
        ("directory = '/nowhere'", "a: it has no directory /nowhere: make it, or name another with [hosts.a]"),
        ("address = '192.0.2.1'", "b: it does not reach a at 192.0.2.1:"),
        ("address = 'no-such-name.invalid'", "b: it does not reach a at no-such-name.invalid:"),
    ],
)
def test_a_host_that_is_set_wrongly(cluster: Cluster, settings: str, says: str) -> None:
    cluster.settings(f"[hosts.a]\n{settings}")
    refused(cluster.call("--hosts", "a,b", PROGRAM), says)


def test_no_paceline_and_other_versions(cluster: Cluster, tmp_path: Path) -> None:
    for name, text in (("empty", ""), ("old", "__version__ = '0.0.1'"), ("broken", "import no_such_module")):
        (tmp_path / name / "paceline").mkdir(parents=True)
        if text:
            (tmp_path / name / "paceline" / "__init__.py").write_text(text)
        else:
            (tmp_path / name / "paceline.py").write_text("raise ImportError('not here')")
            (tmp_path / name / "paceline").rmdir()
        (tmp_path / name / "torch").mkdir()
        (tmp_path / name / "torch" / "__init__.py").touch()
        (tmp_path / name / "torch" / "version.py").write_text("__version__ = '1.2.3+cu999'")
    for host, name in (("a", "empty"), ("b", "old"), ("c", "broken")):
        cluster.host(host, environment=f"PYTHONPATH={tmp_path / name}")
    refused(
        cluster.call("--hosts", "a,b,c", PROGRAM),
        "3 of 3 hosts",
        "has no paceline (ImportError: not here): ssh a ",
        "b: it has paceline 0.0.1, and this machine has",
        "b: it has torch 1.2.3+cu999, and this machine has",
        "has no paceline (ModuleNotFoundError: No module named 'no_such_module'): ssh c ",
    )


def test_two_names_of_one_machine(cluster: Cluster) -> None:
    cluster.host("b", environment=f"PYTHONPATH={python_path()}\nHOME={cluster.folder / 'a'}")
    refused(cluster.call("--hosts", "a,b", PROGRAM), "b: it is the same machine as a: name it once")


def test_a_port_that_is_taken(cluster: Cluster) -> None:
    with socket.create_server(("0.0.0.0", 0)) as other:
        port = other.getsockname()[1]
        refused(
            cluster.call("--hosts", "a,b", "--master", f"127.0.0.1:{port}", PROGRAM),
            f"a: it cannot listen at port {port} (OSError: [Errno 98] Address already in use): name another",
        )


@pytest.mark.slow
def test_ctrl_c_while_hosts_are_checked(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_shell", lambda host, source: "exec sleep 600")
    monkeypatch.setattr(checks, "check_rule", lambda *rule: signal.raise_signal(signal.SIGINT))
    found = cluster.call("--hosts", "a,b", PROGRAM)
    assert found.exit_code == 130 and "stopped by SIGINT" in found.stderr, found.output
