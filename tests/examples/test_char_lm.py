# SPDX-License-Identifier: Apache-2.0
"""The demo: which ways it trains, how it names them, and what it says of them."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline

pytestmark = pytest.mark.plugins

EXAMPLE = Path(__file__).parents[2] / "examples" / "char_lm"

if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def demo() -> Iterator[ModuleType]:
    """The program as a module; the modules beside it go out of sight again."""
    spec = importlib.util.spec_from_file_location("char_lm_demo", EXAMPLE / "demo.py")
    assert spec is not None and spec.loader is not None
    program = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLE))
        patch.setitem(sys.modules, "char_lm_demo", program)  # where its dataclasses look themselves up
        for name in ("data", "model"):
            patch.delitem(sys.modules, name, raising=False)
        spec.loader.exec_module(program)
        yield program
        for name in ("data", "model"):
            sys.modules.pop(name, None)


def arguments(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["demo.py", *words])
    return demo.parse_arguments()


def result(loss: float, workers: int = 4) -> dict[str, Any]:
    return {
        "validation_loss": loss, "training_s": 2.0, "workers": workers, "minibatches_per_worker": 10,
        "bytes_sent_per_worker": 3e6,
    }  # fmt: skip


def test_by_default_four_ways_are_compared(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = demo.chosen_ways(arguments(demo, monkeypatch, "--period", "5"))
    assert [(way.name, way.rule) for way in ways] == [
        ("one worker", None),
        ("BMUF", "bmuf(period=5)"),
        ("averaging", "averaging(period=5)"),
        ("synchronous", "sync"),
    ]
    losses = [result(loss) for loss in (1.0, 1.25, 1.5, 1.125)]
    assert demo.verdict(ways, losses) == "BMUF ends +25.0 % from the worker alone, ahead of averaging."


def test_rules_take_the_place_of_the_standard_ways(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--rule", "sync", "--rule", "bmuf(period=3, momentum=0.9)"]
    ways = demo.chosen_ways(arguments(demo, monkeypatch, *words))
    assert [(way.name, way.rule) for way in ways] == [
        ("one worker", None),
        ("sync", "sync"),
        ("bmuf-period-3-momentum-0.9", "bmuf(period=3, momentum=0.9)"),
    ]
    losses = [result(loss) for loss in (1.0, 1.25, 0.875)]
    assert demo.verdict(ways, losses) == (
        "From the worker alone end: sync +25.0 %, bmuf-period-3-momentum-0.9 -12.5 %."
    )


@pytest.mark.parametrize(
    "rule", ["bmuff", "bmuf(period=0)", "bmuf(perod=3)", "bmuf(8)", "bmuf(", ""], ids=lambda rule: rule or "nothing"
)
def test_a_wrong_rule_is_refused_before_anything_runs(
    demo: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, rule: str
) -> None:
    with pytest.raises(paceline.RuleError) as error:
        paceline.rule_from_text(rule)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--rule", "sync", "--rule", rule, "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as exit:
        demo.main()
    assert exit.value.code == 2
    assert f"argument --rule: {error.value}" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow  # records/2026-11-21_bmuf_four_workers
@pytest.mark.processes
def test_named_rules_are_trained_and_reported(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, str(EXAMPLE / "demo.py"), "--rule", "averaging(period=2)", "--workers", "2"]
    done = subprocess.run(
        [*command, "--minibatches", "8", "--out", str(out)], capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The averaging-period-2 model writes" in done.stdout
    assert "From the worker alone end: averaging-period-2 " in done.stdout
    assert json.loads((out / "averaging-period-2" / "result.json").read_text())["workers"] == 2
    page = (out / "report" / "index.html").read_text(encoding="utf-8")
    assert "Two ways to train a character model" in page
    assert "averaging(period=2)" in page
