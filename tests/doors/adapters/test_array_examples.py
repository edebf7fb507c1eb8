# SPDX-License-Identifier: Apache-2.0
"""The complete programs of the doors over arrays run, and learn."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import python_path

ELSEWHERE = {"tensorflow": "nox --session tensorflow runs this", "chainer": "pip install chainer 'numpy<2' runs this"}
"""Packages that the extra `dev` does not bring along."""
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "workers"), [("numpy", 4), ("sklearn", 2), ("jax", 2), ("keras", 1), ("tensorflow", 2), ("chainer", 2)]
)
def test_the_example_learns_digits(name: str, workers: int, tmp_path: Path) -> None:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed; {ELSEWHERE.get(name, 'the extra dev brings it')}")
    script = str(ROOT / f"examples/frameworks/with_{name}.py")
    around = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    how = ["-m", "paceline", "sim", "--workers", str(workers)] if workers > 1 else []
    command = [sys.executable, *how, script]
    said = subprocess.run(command, env=around, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert said.returncode == 0, said.stderr[-3000:]
    shares = [float(found) for found in re.findall(r"([\d.]+)% of the digits", said.stdout)]
    assert shares and min(shares) > 80, said.stdout
