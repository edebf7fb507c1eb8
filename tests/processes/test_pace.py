# SPDX-License-Identifier: Apache-2.0
"""Real processes time their exchanges, agree on a period, and go on with it together."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import paceline
from paceline.forecast.sim import Clock
from paceline.observe.reports.read import read_run
from paceline.rules import choice
from tests.helpers import same_bits
from tests.processes.launch import run
from tests.processes.pace_programs import SAVED_AT, program

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_two_processes_agree_on_what_they_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same period at the same step, the same bits, also after a resume, and those of virtual workers."""
    run("train", 2, tmp_path, module="pace_programs")

    def periods(name: str, rank: int) -> list[int]:
        found: list[int] = json.loads((tmp_path / f"{name}.{rank}.json").read_text())
        return found

    whole = periods("whole", 0)
    assert whole == [4] * 35 + [12] * 25  # eight blocks are timed, and the ninth exchange brings the period
    assert periods("whole", 1) == whole
    assert periods("second", 0) == periods("second", 1) == whole[SAVED_AT:]
    monkeypatch.setattr(choice, "BLOCKS", 1)
    torch.manual_seed(5)
    slow = Clock(compute=1.0, network=1000.0)
    virtual = paceline.simulate(program(), 2, clock=slow)[0]
    assert virtual is not None and virtual.extra["periods"] == whole
    for name in ("whole", "second"):
        for rank in range(2):
            assert same_bits(load_file(tmp_path / f"{name}.{rank}.safetensors"), virtual.model)
    [tuned] = read_run(tmp_path / "log").tuned
    assert tuned.changes == {"period": (4, 12)} and tuned.why.startswith("an exchange takes ")


@pytest.mark.parametrize("slower", [0.0, 0.03])
def test_two_processes_agree_on_a_rule(tmp_path: Path, slower: float) -> None:
    """Blocks of whatever suits the measured times, the same on both, also after a resume; a worker that is slower makes
    fewer minibatches in each, until the program saves within the pass."""
    run("choose", 2, tmp_path, str(slower), module="pace_programs")

    def rules(name: str, rank: int) -> list[str]:
        found: list[str] = json.loads((tmp_path / f"{name}.{rank}.json").read_text())
        return found

    first, second = rules("first", 0), rules("second", 0)
    assert first[:4] == ["auto(share=1e-06)"] * 4 and first[-1].startswith("bmuf_adam(period=")
    assert rules("first", 1) == first and rules("second", 1) == second
    assert set(second) == {first[-1]}
    assert same_bits(*(load_file(tmp_path / f"second.{rank}.safetensors") for rank in range(2)))
