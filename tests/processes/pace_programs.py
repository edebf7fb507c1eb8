# SPDX-License-Identifier: Apache-2.0
"""What the processes of the test of measured periods run: a whole run, and one that stops and goes on."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from paceline.rules import choice
from tests.helpers import Place, Program, adam
from tests.processes.together import all_here, run_named

RULE = "auto(probe=0, share=1e-6, longest=12, reproducible=True)"
"""No network is that fast, so that whatever is measured asks for the longest period."""
SAVED_AT = 41
"""In the first block of 12 minibatches but one."""


def periods(place: Place) -> None:
    """Write the present period down."""
    place.extra.setdefault("periods", []).append(place.run.rule.schedule.period)


def program(**more: Any) -> Program:
    """60 minibatches on each of two workers."""
    given = {"samples": 480, "epochs": 1, "optimizer": adam, "dropout": 0.2, "after_step": periods, **more}
    return Program(RULE, **given)


def train(directory: Path) -> None:
    """Three runs, one after another."""
    worker, path = int(os.environ["RANK"]), directory / "checkpoint"
    all_here(directory)
    for name, more in (
        ("whole", {"settings": {"timeout_s": 60, "log": directory / "log"}}),
        ("first", {"save_at": SAVED_AT, "save_to": path, "stop_at": SAVED_AT}),
        ("second", {"resume": path}),
    ):
        torch.manual_seed(5)
        out = program(**more)()
        (directory / f"{name}.{worker}.json").write_text(json.dumps(out.extra["periods"]))
        if out.model:
            save_file(out.model, directory / f"{name}.{worker}.safetensors")


def choose(directory: Path, slower: str = "0") -> None:
    """A run whose rule is chosen after a probe, and its continuation; no network is fast enough for that share.

    The second worker's steps take `slower` seconds longer.
    """
    worker, path = int(os.environ["RANK"]), directory / "checkpoint"

    def texts(place: Place) -> None:
        place.extra.setdefault("rules", []).append(place.run.rule.text())
        time.sleep(float(slower) * worker)

    all_here(directory)
    for name, more in (
        ("first", {"save_at": SAVED_AT, "save_to": path, "stop_at": SAVED_AT}),
        ("second", {"resume": path}),
    ):
        torch.manual_seed(5)
        given = {"samples": 480, "epochs": 1, "optimizer": adam, "after_step": texts}
        out = Program("auto(share=1e-6)", **given, **more)()  # type: ignore[arg-type]
        (directory / f"{name}.{worker}.json").write_text(json.dumps(out.extra["rules"]))
        if out.model:
            save_file(out.model, directory / f"{name}.{worker}.safetensors")


if __name__ == "__main__":
    choice.BLOCKS = 1  # that a pass should have
    run_named(globals(), *sys.argv[1:])
