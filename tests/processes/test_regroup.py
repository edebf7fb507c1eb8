# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of 4 processes that 3 go on from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.test_reshard import Quadratic, simulate
from tests.helpers import same_bits
from tests.processes.launch import run
from tests.processes.regroup_programs import RULES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


@pytest.mark.slow  # tests/checkpoint/test_reshard.py with virtual workers
def test_three_processes_go_on_where_four_stopped(tmp_path: Path) -> None:
    """All begin at the saved global model and end alike and better; in a fixed order of sums, with virtual bits."""
    run("save", 4, tmp_path, module="regroup_programs")
    run("resume", 3, tmp_path, module="regroup_programs")
    for number, (rule, optimizer) in enumerate(RULES):
        saved = load_file(tmp_path / f"c{number}" / "global.safetensors")
        starts, finals, losses = (
            [load_file(tmp_path / f"{name}.{number}.{rank}.safetensors") for rank in range(3)]
            for name in ("start", "final", "losses")
        )
        assert all(same_bits(start, saved) for start in starts), rule
        assert all(same_bits(final, finals[0]) for final in finals), rule
        curve = torch.stack([loss["losses"] for loss in losses]).mean(0)
        assert curve[-5:].mean() < 0.3, rule  # it begins at 0.5
        if "reproducible" in rule:
            program = Quadratic(rule, optimizer, 30, resume=tmp_path / f"c{number}")
            assert same_bits(finals[0], simulate(program, 3)[0].final), rule
