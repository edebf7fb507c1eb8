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


@pytest.mark.plugins
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("place", ["/proc/none", "ok.py/below", "/dev/null/x"])
def test_a_log_directory_that_cannot_be(command: str, place: str) -> None:
    Path("ok.py").write_text("import paceline\npaceline.attach\n")
    done = call(command.replace("PLACE", place))
    assert done.exit_code == 2 and isinstance(done.exception, SystemExit)
    assert f"--log {place}" in done.stderr and "is not writable" in done.stderr, done.stderr


@pytest.mark.plugins
def test_a_port_that_another_program_has_and_a_name_that_nobody_knows() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = call(f"run --hosts 2 --host-index 0 --master 127.0.0.1:{port} ok.py")
    assert done.exit_code == 2 and f"port {port} is in use" in done.stderr
    done = call("run --hosts 2 --host-index 1 --master no.such.name.invalid:29500 ok.py")
    assert done.exit_code == 2 and "this host does not know no.such.name.invalid" in done.stderr


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
