# SPDX-License-Identifier: Apache-2.0
"""Runs over files for tests: in the working directory, with a tool of a few lines."""

from __future__ import annotations

import array
import json
import sys
from pathlib import Path
from typing import Any

from paceline_plugins.files.plan import Plan, checksum

TOOL = Path(__file__).with_name("tool.py")
COMMAND = [sys.executable, "-I", "-S", str(TOOL), "{model}", "{model_out}", "{part}", "{lr}"]
AVERAGING, MOMENTUM = "averaging(reproducible=True)", "bmuf(momentum=0.5, lr=1.0, reproducible=True)"


def plan(*more: str, numbers: tuple[float, ...] = (0.0, 1.0, -2.0), **options: Any) -> Plan:
    """A plan for two workers; writes its model file."""
    model = Path("model.bin")
    model.write_bytes(b"   x" + array.array("f", numbers).tobytes())
    Path("work").mkdir(exist_ok=True)
    lines = options.get("data")
    plain: dict[str, Any] = {
        "command": [*COMMAND, *more],
        "starter": [],
        "model": str(model.absolute()),
        "out": str(Path("out.bin").absolute()),
        "work": str(Path("work").absolute()),
        "rule": AVERAGING,
        "format": "flat",
        "layout": "skip:4, w:f32:*",
        "data": None,
        "parts": 2,
        "epochs": 1,
        "shuffle": True,
        "seed": 0,
        "lr": 0.25,
        "lr_final": None,
        "loss": None,
        "newbob": False,
        "keep": 100,
        "timeout_s": 60.0,
        "model_sum": checksum(model.read_bytes()),
        "list_sum": "" if lines is None else checksum(Path(lines).read_bytes()),
    }
    return Plan(**{**plain, **options})


def numbers(path: Path | str) -> list[float]:
    """The numbers of a model file."""
    return list(array.array("f", Path(path).read_bytes()[4:]))


def rows() -> list[dict[str, Any]]:
    """The blocks of the journal."""
    found: list[dict[str, Any]] = json.loads(Path("work/journal.json").read_text())["blocks"]
    return found
