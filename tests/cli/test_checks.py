# SPDX-License-Identifier: Apache-2.0
"""What a command says before anything starts: places, ports and rules that cannot be, and whom it waits for."""

from __future__ import annotations

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import paceline
from paceline.cli.launch.messages import Messages
from paceline.cli.run.conclusion import finished
from paceline.cli.run.failure import LOST
from paceline.cli.run.rule_check import checked
from paceline.rules import CODECS, RECIPES
from tests.helpers import make_net, sgd
from tests.paths import python_path


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "250")
    for name in ("PACELINE_RULE", "PACELINE_RULE_ASKED"):
        monkeypatch.delenv(name, raising=False)
    Path("ok.py").write_text("print('ok')\n")


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


@pytest.mark.processes
def test_the_stand_in_for_torch_judges_rules_as_torch_does() -> None:
    rules = [*RECIPES, *(f"bmuf(codec={codec!r})" for codec in CODECS), "bmuf(period=0)", "bmuf(rank=1)", "easgd(x=1)"]
    code = f"from paceline.cli.run.rule_check import checked; print([checked(rule, False) for rule in {rules!r}])"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; assert 'torch' not in sys.modules"],
        env={"PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [tuple(one) for one in ast.literal_eval(done.stdout)] == [checked(rule, False) for rule in rules]


def test_a_worker_whose_contributions_were_all_rejected_is_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"kind": "attach", "at_s": 0.0, "rank": 0, "size": 2, "rule": "bmuf()"}]
    lines += [{"kind": "close", "at_s": 1.0, "rank": 0, "minibatches": 8, "bytes": 0, "always_rejected": [1]}]
    (tmp_path / "rank-000.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert finished(tmp_path, False, 2, Messages()) == LOST
    assert "worker 1 contributed nothing to the model: exit code 3" in capsys.readouterr().err
