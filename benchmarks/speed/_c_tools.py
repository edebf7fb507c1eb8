# SPDX-License-Identifier: Apache-2.0
"""Compiles `examples/c_tool` and trains it, for the benchmarks of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from _workers import is_quick

from paceline_c.build import Place, build

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parents[1] / "examples" / "c_tool"


def told(command: list[str]) -> str:
    """What a command prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def on_workers(count: int, command: list[str], folder: Path, rule: str | None = None) -> str:
    """What the workers of `paceline run` print; one worker of a quick form needs no launcher."""
    if is_quick() and count == 1:
        return told(["env", f"PACELINE_RULE={rule}", *command] if rule else command)
    asked = ["--rule", rule] if rule else []
    start = [sys.executable, "-m", "paceline", "run", "--workers", str(count), "--overwrite", "--log"]
    return told([*start, str(folder / "log"), *asked, *command])


def compile_example(place: Place, folder: Path) -> None:
    """The library, and the example's programs; two quick forms may share a folder."""
    if is_quick() and place.fresh():
        return
    build(place)
    flags = " ".join([*place.cflags(), *place.libs()])
    told(["make", "-s", "-C", str(EXAMPLE), f"OUT={folder}", f"CONFIG=echo {flags}; true", "all"])


def frames(folder: Path, name: str, count: int, seed: int) -> None:
    """Data of the example."""
    told([str(folder / "frames"), str(folder / name), str(count), str(seed)])
