# SPDX-License-Identifier: Apache-2.0
"""What a command says before anything starts: places, ports and rules that cannot be, and whom it waits for."""

from __future__ import annotations

import runpy
import shlex
import socket
import sys
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner, Result

import paceline
from paceline.cli import app
from paceline.cli.launch.cluster import LaunchCluster
from paceline.cli.launch.launch import _waits_for
from paceline.cli.run import checks
from paceline_plugins.sites import elastic_checks
from tests.helpers import make_net, sgd


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    for name in ("PACELINE_RULE", "PACELINE_RULE_ASKED"):
        monkeypatch.delenv(name, raising=False)
    Path("ok.py").write_text("print('ok')\n")


def call(line: str) -> Result:
    return CliRunner().invoke(app, shlex.split(line))


COMMANDS = (
    "run --log PLACE ok.py",
    "sim --log PLACE ok.py",
    "run --elastic 1:1 --log PLACE ok.py",
    "tune --search 'lr=log(1e-3,1)' --log PLACE ok.py",
)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["/proc/none", "ok.py/below", "/dev/null/x"])
def test_a_log_directory_that_cannot_be(command: str, place: str) -> None:
    if command.startswith("tune"):
        pytest.importorskip("optuna")
    Path("ok.py").write_text("import paceline\npaceline.attach\n")
    done = call(command.replace("PLACE", place))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert f"--log {place}" in done.stderr and "is not writable" in done.stderr, done.stderr


def test_a_port_that_another_program_has_and_a_name_that_nobody_knows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call(f"run --hosts 2 --host-index 0 --master 127.0.0.1:{port} ok.py")
    assert done.exit_code == 2 and f"another program of this host listens at port {port}" in done.stderr
    done = call("run --hosts 2 --host-index 1 --master no.such.name.invalid:29500 ok.py")
    assert done.exit_code == 2 and "this host does not know no.such.name.invalid" in done.stderr


def test_whom_a_launcher_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "host 1 waits for host 0 at n0:29500, 60 s at most" in _waits_for(
        LaunchCluster(2, 3, 1, ("n0", 29500), 60.0)
    )
    said = _waits_for(LaunchCluster(2, 3, 0, ("n0", 29500), 60.0))
    assert "host 0 waits at n0:29500 for 2 more of 3 hosts, 60 s at most" in said and "--host-index 1 to 2" in said
    monkeypatch.setattr(elastic_checks, "SAY_AFTER_S", 0.0)
    monkeypatch.setattr(elastic_checks, "reachable", lambda where: False)
    done = call("run --join 127.0.0.1:1 --open --timeout 1 --as-is ok.py")
    assert done.exit_code == 2 and "no launcher listens at 127.0.0.1:1 yet: waiting" in done.stderr, done.stderr
    assert "no launcher listens at 127.0.0.1:1 within 1 s" in done.stderr


def test_a_rule_of_the_command_line_is_not_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_RULE", "bmuf(period=4)")
    monkeypatch.setenv("PACELINE_RULE_ASKED", "1")
    model = make_net()
    with pytest.raises(paceline.RuleError, match=r"--rule asks for bmuf\(period=4\), and the program .*averaging"):
        paceline.attach(model, sgd(model.parameters()), "averaging")
    paceline.attach(model, sgd(model.parameters()), "bmuf", period=4).close()
    paceline.attach(model, sgd(model.parameters())).close()


def test_ctrl_c_while_the_command_is_loaded_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(ModuleType):
        def __getattr__(self, name: str) -> object:
            raise KeyboardInterrupt if name == "app" else AttributeError(name)

    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise SystemExit(code)

    monkeypatch.delitem(sys.modules, "paceline.__main__", raising=False)
    monkeypatch.setitem(sys.modules, "paceline.cli", Interrupted("paceline.cli"))
    monkeypatch.setattr("os._exit", end)
    main = runpy.run_module("paceline.__main__")["main"]
    with pytest.raises(SystemExit):
        main()
    assert codes == [130] and capsys.readouterr().err == "stopped before anything was started\n"


def test_far_more_workers_than_processors_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    checks.warn_oversubscription(100_000, quiet=False)
    assert "100000 workers share " in capsys.readouterr().err
    checks.warn_oversubscription(1, quiet=False)
    checks.warn_oversubscription(100_000, quiet=True)
    assert capsys.readouterr().err == ""


def test_a_number_of_workers_that_grows_is_not_for_searches() -> None:
    pytest.importorskip("optuna")
    result = call("""tune --search lr=log(1e-4,1e-1) --workers 2 --rule "bmuf(grow='auto')" ok.py""")
    assert result.exit_code == 2 and "the number of workers of this run is fixed" in result.output
