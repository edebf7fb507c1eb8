# SPDX-License-Identifier: Apache-2.0
"""`--hosts` with names: what it means, what `--print` says, and what is refused before ssh is asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from paceline.cli import app
from paceline.cli.run.options import HostOptions
from paceline_plugins.ssh import client, program_files
from paceline_plugins.ssh.hosts import Host, read

PROGRAM = "train.py"


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(program_files, "_by_git", lambda top: None)
    monkeypatch.setattr(client, "is_here", lambda host: host.name == "here")
    monkeypatch.setattr(client, "installed", lambda: False)  # what passes all checks ends here, before any process
    (tmp_path / PROGRAM).write_text("import paceline\nrun = paceline.attach(model, optimizer)")


def call(*arguments: object, **variables: str) -> Result:
    return CliRunner(env=variables).invoke(app, ["run", *map(str, arguments)])


def names(text: str, tables: dict[str, Any] | None = None, **variables: str) -> list[Host]:
    return read(text, tables or {}, variables)


@pytest.mark.parametrize(
    ("text", "means"),
    [
        ("a,b", [Host("a"), Host("b")]),
        (" a , b.example.org ", [Host("a"), Host("b.example.org")]),
        ("me@a,b:2222", [Host("a", "me"), Host("b", port=2222)]),
        ("me@10.0.0.1:22", [Host("10.0.0.1", "me", 22)]),
        ("[fe80::1%eth0]:22,[::1]", [Host("fe80::1%eth0", port=22), Host("::1")]),
        ("gpu[01-03],x", [Host("gpu01"), Host("gpu02"), Host("gpu03"), Host("x")]),
        ("a", [Host("a")]),
    ],
)
def test_a_list(text: str, means: list[Host]) -> None:
    assert names(text) == means


def test_the_number_of_hosts_is_still_a_number() -> None:
    texts = (None, "2", " 3", "-1", "a", "a,2", "2,3")
    assert [HostOptions(None, text).named for text in texts] == [False] * 4 + [True] * 3


def test_a_hostfile_of_mpirun_and_deepspeed(tmp_path: Path) -> None:
    Path("hostfile").write_text("# two boxes\na slots=4\n\nme@b:2222 slots=2 max_slots=8  # the small one\nc\n")
    means = [Host("a", workers=4), Host("b", "me", 2222, workers=2), Host("c")]
    assert names("@hostfile") == names("hostfile") == names("./hostfile") == names(f"{tmp_path}/hostfile") == means


def test_slurm_and_all() -> None:
    assert names("slurm", SLURM_JOB_NODELIST="n[1-2]") == [Host("n1"), Host("n2")]
    assert names("all", {"a": {}, "b": {"workers": 3}}) == [Host("a"), Host("b", workers=3)]


def test_a_table_describes_a_host() -> None:
    table = {"directory": "~/train", "python": "/opt/py", "workers": 2, "address": "10.0.0.5", "environment": {"X": 1}}
    assert names("me@a,b", {"a": table}) == [
        Host("a", "me", None, 2, "~/train", "/opt/py", {"X": "1"}, "10.0.0.5"),
        Host("b"),
    ]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no host"),
        (",", "has an empty name"),
        ("a,,b", "has an empty name"),
        ("a,b,a", "names a twice"),
        ("x@a,y@a", "names a twice"),
        ("a b", "'a b' is no host"),
        ("-oProxyCommand=x", "is no host"),
        ("a:0", "is no host"),
        ("a:99999", "is no host"),
        ("@a,b", "hostfile a,b cannot be read"),
        ("@nowhere", "the hostfile nowhere cannot be read (No such file"),
        ("./nowhere", "the hostfile nowhere cannot be read"),
        ("@.", "cannot be read (Is a directory)"),
        ("slurm", "SLURM_JOB_NODELIST is not set: take nodes first"),
        ("all", "no paceline.toml from here upwards has a table"),
        ("n[1-300]", "names 300 hosts"),
        ("n[3-1]", "empty or too long"),
    ],
)
def test_names_that_mean_nothing(text: str, says: str) -> None:
    found = call("--hosts", text, PROGRAM)
    assert found.exit_code == 2 and says in found.stderr, found.stderr


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ("", "names no host"),
        ("a slots=four", "line 1: 'slots=four' is not slots=N"),
        ("a\nb slots=0", "line 2: 'slots=0' is not slots=N"),
        ("a gpus=2", "line 1: 'gpus=2' is not slots=N"),
        ("a\n-b", "line 2: '-b' is no host"),
        ("a\na", "names a twice"),
        ("\udcff", "it is not text"),
    ],
)
def test_hostfiles_that_are_none(lines: str, says: str) -> None:
    Path("hostfile").write_bytes(lines.encode(errors="surrogateescape"))
    found = call("--hosts", "hostfile", PROGRAM)
    assert found.exit_code == 2 and says in found.stderr, found.stderr


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--host-index", 0], "--host-index is for a command that is typed on each host"),
        (["--master", "a"], "--master must be HOST:PORT"),
        (["--master", "a:0"], "--master must be HOST:PORT"),
        (["--job", "job.pem"], "the job's secret goes to them over ssh"),
        (["--elastic", "1:1"], "the hosts start 2 workers, and --elastic 1:1 allows 1"),
        (["--elastic", "4"], "--elastic must be MIN:MAX"),
        (["--elastic", "1:4", "--grace", 0], "--grace must lie above 0"),
        (["--elastic", "1:4", "--listen", "a:1"], "--listen: with names of hosts the first one listens"),
        (["--join", "a:1"], "--join: with names of hosts the first one listens"),
        (["--listen", "a:1"], "--listen belongs to --elastic"),
        (["--workers", 0], "--workers must be at least 1, got 0"),
        (["--timeout", 0], "--timeout must be at least 1 second"),
        (["--print", "--rule", "nonsense"], "--rule:"),
        (["--transport", "mpi"], "mpiexec"),
        (["--restarts", -1], "--restarts must be at least 0"),
        (["--job", "j", "--open"], "--job and --open exclude each other"),
        ([], "there is no ssh on PATH"),
    ],
)
def test_options_that_do_not_go_with_names(options: list[object], says: str) -> None:
    found = call("--hosts", "a,b", *options, PROGRAM)
    assert found.exit_code == 2 and says in found.stderr, found.stderr


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ("[hosts.a]\npyton = 'x'", "[hosts.a]: pyton is no setting of a host (did you mean 'python'?)"),
        ("[hosts.a]\nworkers = 0", "[hosts.a]: workers must be a number from 1, got 0"),
        ("[hosts.a]\nworkers = true", "[hosts.a]: workers must be a number from 1, got True"),
        ("[hosts.a]\ndirectory = ''", "[hosts.a]: directory must be a text, got ''"),
        ("[hosts.a]\nenvironment = 'X=1'", '[hosts.a]: environment must be a table such as { NAME = "value" }'),
        ("[hosts.a]\nenvironment = { 'X Y' = 1 }", "[hosts.a]: environment must be a table"),
        ("[hosts]\na = 1", "hosts.a must be a table, got 1"),
    ],
)
def test_tables_that_describe_no_host(settings: str, says: str) -> None:
    Path("paceline.toml").write_text(settings)
    found = call("--hosts", "a,b", PROGRAM)
    assert found.exit_code == 2 and says in found.stderr, found.stderr


@pytest.mark.parametrize("hosts", ["'here,me@b:2222'", "['here', 'me@b:2222']"])
def test_print_starts_nothing_and_shows_every_command_without_the_secret(hosts: str) -> None:
    Path("paceline.toml").write_text(
        f"[run]\nhosts = {hosts}\n[hosts.b]\nworkers = 2\npython = '/opt/py'\ndirectory = '/data/x'\n"
        "environment = { TOKEN = 'hunter2' }\n"
    )
    found = call("--print", "--rule", "bmuf(period=4)", PROGRAM, "--", "--lr", "0.1")
    assert found.exit_code == 0, found.output
    said = found.stdout
    assert "2 hosts, 3 workers" in said and "here (this machine)" in said and "hunter2" not in said
    first, second = [line.strip() for line in said.splitlines() if " paceline run " in line]
    assert first.startswith("python3 -m paceline run --rule 'bmuf(period=4)' --workers 1 ")
    assert "ssh " in second and "-p 2222 -- me@b 'cd /data/x && /opt/py -m paceline run" in second
    assert "--workers 2" in second and "--hosts 2 --host-index 1" in second and second.endswith(f"{PROGRAM} --lr 0.1'")
    assert f"where {PROGRAM} is missing or differs, 2 files" in said
    assert {path.name for path in Path().iterdir()} == {PROGRAM, "paceline.toml"}


def test_an_elastic_run_has_one_launcher_that_is_joined() -> None:
    elastic = ["--elastic", "1:8", "--grace", "2", "--master", "10.0.0.1:4000"]
    said = call("--print", "--hosts", "a,b", "--workers", 2, *elastic, PROGRAM).stdout
    first, second = [line.partition("paceline run ")[2] for line in said.splitlines() if " paceline run " in line]
    assert "--elastic 1:8 --grace 2 --listen 10.0.0.1:4000" in first and "--quiet" not in first
    assert "--join 10.0.0.1:4000" in second and "--quiet" in second
    assert "--hosts" not in first + second and "--elastic" not in second and "--grace" not in second
