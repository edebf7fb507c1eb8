# SPDX-License-Identifier: Apache-2.0
"""A number of workers that grows, on real processes over gloo: the bits of virtual workers, also after a stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import same_bits, simulate
from tests.processes.grown_programs import Grown
from tests.processes.launch import run

pytestmark = pytest.mark.processes
MODULE = "grown_programs"


@pytest.mark.parametrize(
    "rule",
    [
        "bmuf(period=2, grow='1:8, 2:24', reproducible=True)",
        "bmuf_adam(period=3, grow='auto(threshold=0.01, blocks=2)', reproducible=True)",
    ],
)
def test_processes_have_the_bits_of_virtual_workers(rule: str, tmp_path: Path) -> None:
    virtual = simulate(Grown(rule), 4)
    run("grown", 4, tmp_path, rule, module=MODULE)
    for rank, seen in enumerate(virtual):
        batches = json.loads((tmp_path / f"seen.{rank}").read_text())
        assert [list(row) for row in seen.batches] == batches
        assert same_bits(load_file(tmp_path / f"model.{rank}.safetensors"), seen.model)


def test_processes_go_on_within_a_stage_with_the_same_bits(tmp_path: Path) -> None:
    """From checkpoints of stages of one worker and of two; virtual workers keep one after each exchange."""
    rule = "bmuf(period=2, grow='1:6, 2:22', reproducible=True)"
    virtual = simulate(Grown(rule, place=tmp_path / "steps"), 4)
    for name in ("step-000000004", "step-000000010"):
        place = tmp_path / name
        shutil.copytree(tmp_path / "steps" / name, place / name)
        run("grown", 4, place, rule, str(place), module=MODULE)
        for rank, seen in enumerate(virtual):
            again = json.loads((place / f"seen.{rank}").read_text())
            assert again == [list(row) for row in seen.batches[len(seen.batches) - len(again) :]]
            assert same_bits(load_file(place / f"model.{rank}.safetensors"), seen.model)


def test_batches_that_loader_processes_made_ahead_are_trained_once() -> None:
    rule = "bmuf(period=2, grow='1:4, 2:12')"
    ahead, plain = simulate(Grown(rule, 96, epochs=1, loader_processes=2), 4), simulate(Grown(rule, 96, epochs=1), 4)
    assert [seen.batches for seen in ahead] == [seen.batches for seen in plain]
    assert [len(seen.batches) for seen in ahead] == [11, 7, 3, 3]
    assert all(same_bits(one.model, other.model) for one, other in zip(ahead, plain, strict=True))
