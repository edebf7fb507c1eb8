# SPDX-License-Identifier: Apache-2.0
"""Members that are judged by held-out loss, on real processes over gloo: the bits and the log of virtual workers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.helpers import same_bits, simulate
from tests.processes.judged_programs import judged
from tests.processes.launch import run

pytestmark = pytest.mark.processes


def told(directory: Path, rank: int) -> list[tuple[int, str, int]]:
    """What the log of a worker has of contributions that were left out, without the names of hosts."""
    lines = [json.loads(line) for line in (directory / f"rank-{rank:03d}.jsonl").read_text().splitlines()]
    return [(e["rank_left_out"], e["why"], e["exchange"]) for e in lines if e["kind"] == "left_out"]


@pytest.mark.parametrize(
    "rule", ["bmuf(period=4, local_state='reset', reproducible=True)", "bmuf_adam(period=4, reproducible=True)"]
)
def test_processes_have_the_bits_of_virtual_workers(rule: str, tmp_path: Path) -> None:
    here, there = tmp_path / "virtual", tmp_path / "gloo"
    there.mkdir()
    virtual = simulate(judged(rule, here), 4)
    run("judged", 4, there, rule, module="judged_programs")
    assert told(here, 0)
    for rank, out in enumerate(virtual):
        assert same_bits(load_file(there / f"model.{rank}.safetensors"), out["model"])
        assert told(there, rank) == told(here, 0)
