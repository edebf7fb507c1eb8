# SPDX-License-Identifier: Apache-2.0
"""Workers whose parameters are shards (fully_shard) over two processes each, on real processes over gloo."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.processes.launch import run
from tests.processes.sharded_programs import CASES

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

REFUSED = {
    "no group": "workers exchange shards of the same place, and weight is one; pass the processes that hold it",
    "the group of the shards": "has shard=[0, 2] and rank 1",
    "checkpoint": "weight is sharded over several processes (fully_shard): leave checkpoint= out",
    "receipts": "all processes of a worker would write one chain of receipts",
    "tune": "several processes train the model of a worker together",
    "ddp, auto": "measured times choose its period",
    "ddp, receipts": "all processes of a worker would write one chain of receipts",
    "ddp, tune": "several processes train the model of a worker together",
    "sync": "fully_shard does itself over a mesh of two dimensions",
    "one_bit": "fully_shard does itself",
    "bmuf(warmup=2)": "fully_shard does itself",
    "bmuf(within='host')": "fully_shard does itself",
    "auto": "measured times choose its period",
    "auto(probe=0)": "measured times choose its period",
    "asgd": "fully_shard does itself",
    "easgd": "asynchronous rules do not take",
    "save": "model.0.weight is sharded (a DTensor)",
    "export": "cannot be copied; evaluate it in `with run.global_model():`",
    "state": "True",
    "values": "True",
}


@pytest.mark.slow  # tests/run has the refusals
def test_shards_train_as_whole_models_do_or_are_refused(tmp_path: Path) -> None:
    """Rules x one bad number in one shard: a guard decides alike for all shards of a worker."""
    run("sharded", 4, tmp_path, module="sharded_programs")
    for rank in range(4):
        found = json.loads((tmp_path / f"sharded.{rank}.json").read_text())
        assert found["apart"].keys() == {f"{rule}, {bad}" for rule, bad in CASES}
        assert {name: apart for name, apart in found["apart"].items() if not apart < 1e-5} == {}
        assert {name: said for name, said in found["refused"].items() if REFUSED[name] not in said} == {}
        assert found["refused"].keys() == REFUSED.keys()
