# SPDX-License-Identifier: Apache-2.0
"""The example of a rule of one's own: its equation, the laws, and that it learns."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.rules.outer.base import Coefficients
from paceline.rules.payload import Delta
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock
from paceline.testing import check_rule

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_rule"

if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)


@pytest.fixture
def own() -> Any:
    return runpy.run_path(str(EXAMPLE / "fed_adam.py"))["FedAdam"](lr=0.1, beta1=0.5, beta2=0.75, tau=0.5)


def test_the_step_is_the_equation(own: Any) -> None:
    theta, state = torch.zeros(1), {name: torch.zeros(1) for name in own.tensors}
    c = Coefficients(momentum=own.momentum_at(1, 4), lr=own.lr_at(1, 4), ahead=0.5, next_momentum=0.5)
    start = own.step(theta, torch.tensor([4.0]), state, c, torch.empty(1))
    assert float(state["m"]) == 2.0  # 0.5 * 4
    assert float(state["v"]) == 4.0  # 0.25 * 16
    assert float(theta) == pytest.approx(0.1 * 2 / (2 + 0.5))
    assert torch.equal(start, theta)


def test_it_keeps_the_laws(own: Any) -> None:
    check_rule(Rule(EveryBlock(3), Delta(), outer=own))


def test_it_trains_and_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.setattr(sys, "argv", ["train.py", "--workers", "2", "--epochs", "2"])
    runpy.run_path(str(EXAMPLE / "train.py"), run_name="__main__")
    losses = {line[:12].strip(): float(line[12:]) for line in capsys.readouterr().out.splitlines()}
    assert set(losses) == {"averaging", "bmuf", "outer Adam"}
    assert all(loss < 1.8 for loss in losses.values())  # guessing has 2.3


def test_the_page_shows_the_program() -> None:
    """Without type hints, which the page leaves out."""
    page = (EXAMPLE.parents[1] / "docs" / "guide" / "plugins.md").read_text(encoding="utf-8")
    program = (EXAMPLE / "fed_adam.py").read_text(encoding="utf-8")
    body = [line.strip() for line in program[program.index("    lr: float") :].splitlines() if "def " not in line]
    assert all(line in page for line in body if line)
