# SPDX-License-Identifier: Apache-2.0
"""`benchmarks/claims.py`: all benchmarks and records have a quick form; a key that a document quotes cannot vanish."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import paceline

ROOT = Path(paceline.__file__).parents[2]

if not (ROOT / "benchmarks").is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def claims() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("claims", ROOT / "benchmarks" / "claims.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["claims"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["claims"]


def test_every_benchmark_has_a_quick_form(claims: ModuleType) -> None:
    texts = {name: (ROOT / "benchmarks" / f"{name}.py").read_text(encoding="utf-8") for name in claims.benchmarks()}
    assert [name for name, text in texts.items() if "_quick.parse" not in text and '"--quick"' not in text] == []


def test_every_record_has_a_command_with_a_quick_form_or_names_the_commit_that_has_it(claims: ModuleType) -> None:
    commands = {name: (ROOT / "records" / name / "run.sh") for name in claims.records()}
    assert [name for name, path in commands.items() if "common.sh" not in path.read_text(encoding="utf-8")] == []
    others = [path for path in (ROOT / "records").glob("*/README.md") if path.parent.name not in commands]
    command = "`git checkout [0-9a-f]{8}`, then `records/%s/run.sh`"
    assert [path for path in others if not re.search(command % path.parent.name, path.read_text("utf-8"))] == []


def test_every_benchmark_is_run(claims: ModuleType) -> None:
    inside = {name for record in claims.records() for name in claims.used_by(record)}
    alone = {claims.named(name) for name in claims.wanted([]) if name.startswith("benchmarks/")}
    assert inside | alone == set(claims.benchmarks())


@pytest.mark.parametrize(
    ("figures", "key", "there"),
    [
        ({"ratio": 1.0}, "ratio", True),
        ({"ratio": 1.0}, "ratios", False),
        ({"efficiency": {"bmuf": 0.9}}, "efficiency.bmuf", True),
        ({"efficiency": {"bmuf": 0.9}}, "efficiency.ddp", False),
        ({"copies": {"int8": 2.0}}, "copies.NAME", True),
        ({"copies": {}}, "copies.NAME", True),
        ({"cells": [{"error": 0.1}]}, "error", True),
        ({"cells": [{"error": 0.1}]}, "cells.error", True),
        ([{"a": None}], "a", True),
        (3, "a", False),
    ],
)
def test_a_key_is_looked_for_at_any_depth(claims: ModuleType, figures: Any, key: str, there: bool) -> None:
    assert claims.has(figures, key) is there


def test_keys_are_read_off_docstrings_and_documents(claims: ModuleType) -> None:
    keys = {"ratio", "ratio_1gbit", "mpi_ratio", "processor_ratio", "moved_gb", "bus_gb_s", "bound_ratio"}
    assert claims.promised("speed/sync_cost") == keys
    assert {"ratio", "ratio_1gbit"} <= claims.quoted()["speed/sync_cost"]
    assert claims.QUOTED.findall("see `python benchmarks/a/b.py --b` `c`, `d.e` and `f`.") == [
        ("a/b", " `c`, `d.e` and `f`")
    ]


def test_documents_name_only_benchmarks_that_there_are(claims: ModuleType) -> None:
    assert set(claims.quoted()) <= set(claims.benchmarks())


def test_a_key_that_is_gone_is_found(claims: ModuleType) -> None:
    made = dict.fromkeys(claims.promised("speed/sync_cost"), 1.0)
    less = {key: value for key, value in made.items() if key != "ratio_1gbit"}
    claim = claims.Claim("benchmarks/speed/sync_cost.py", figures={("speed/sync_cost", ""): less})
    assert list(claims.gone(claim, {})) == [
        "benchmarks/speed/sync_cost.py: nothing has `ratio_1gbit`, which its docstring or a document quotes"
    ]
    quoted = {"speed/sync_cost": {"chunks"}}
    whole = claims.Claim("benchmarks/speed/sync_cost.py", figures={("speed/sync_cost", ""): made})
    assert list(claims.gone(whole, {})) == []
    assert len(list(claims.gone(whole, quoted))) == 1


def test_a_key_of_a_record_that_is_gone_is_found(claims: ModuleType) -> None:
    made = {"overhead": 1.4, "speedup": 9.0, "minibatch_ms": 1.0, "start_ms": 1.0}
    claim = claims.Claim("records/2026-11-22_simulator", figures={("speed/sim", "result"): made})
    assert "which records/2026-11-22_simulator/result.json has, is gone" in next(claims.gone(claim, {}))


def test_a_benchmark_without_a_last_line_of_json_is_found(claims: ModuleType) -> None:
    claim = claims.Claim(
        "benchmarks/speed/sim.py", figures={("speed/sim", ""): claims.last_line("a table\nand no JSON")}
    )
    assert list(claims.gone(claim, {})) == ["benchmarks/speed/sim.py does not end with a JSON object"]


@pytest.mark.processes
def test_a_command_that_fails_is_a_claim_that_cannot_be_made(claims: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("print('what it was doing')\nraise SystemExit(3)\n", encoding="utf-8")
    claim = claims.Claim("broken.py")
    claims.run(claim, tmp_path, 60.0, show=False)
    assert claim.wrong == ["ends with exit code 3; it printed last:\nwhat it was doing"]
