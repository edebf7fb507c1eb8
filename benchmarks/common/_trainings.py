# SPDX-License-Identifier: Apache-2.0
"""Trainings of a benchmark, each in a process of its own, kept so that it goes on where it was stopped."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Wanted = tuple[str, int]
"""What is trained, and the seed."""


def file_of(out: Path, what: Wanted) -> Path:
    """Where a training leaves what came out."""
    return out / f"{what[0]}-{what[1]}.json"


def leave(out: Path, what: Wanted, row: dict[str, Any]) -> None:
    """Say what came out; the training is over."""
    file_of(out, what).write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")


def rows_of(
    out: Path, wanted: Sequence[Wanted], jobs: int, here: Callable[[str, int], None] | None = None
) -> list[dict[str, Any]]:
    """Train what is not there yet, `jobs` at a time: this program with `--one NAME SEED` after its own arguments.

    With `here`, which trains one, and with `--quick` this process trains them one after another: tiny trainings take
    less time than the start of a process.
    """
    quick = "--quick" in sys.argv

    def start(what: Wanted) -> None:
        arguments = [*sys.argv, "--one", what[0], str(what[1])]
        if file_of(out, what).exists():
            return
        if here is not None:
            here(*what)
        elif quick:
            _run_program(arguments)
        else:
            subprocess.run([sys.executable, *arguments], check=True)

    with ThreadPoolExecutor(1 if here or quick else jobs) as pool:
        list(pool.map(start, wanted))
    return [json.loads(file_of(out, what).read_text(encoding="utf-8")) for what in wanted]


def _run_program(arguments: list[str]) -> None:
    """Run a program in this process, as `python ARGUMENTS` would."""
    own, sys.argv = sys.argv, arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        sys.argv = own
