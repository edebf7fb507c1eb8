# SPDX-License-Identifier: Apache-2.0
"""Keras 3 on the backends that are served, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import python_path

if importlib.util.find_spec("keras") is None:  # an import would ask for a backend
    pytest.skip("keras is not installed", allow_module_level=True)
WITH_TENSORFLOW = pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None, reason="tensorflow is not installed: nox --session tensorflow"
)
ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["torch", "jax", pytest.param("tensorflow", marks=WITH_TENSORFLOW)])
def test_fit_under_a_rule(backend: str, tmp_path: Path) -> None:
    around = {**os.environ, "KERAS_BACKEND": backend, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.doors.adapters.keras_program", str(tmp_path)]
    said = subprocess.run(command, env=around, cwd=ROOT, capture_output=True, text=True, timeout=580)
    assert said.returncode == 0, said.stderr[-3000:]
    seen = json.loads(said.stdout.splitlines()[-1])
    assert seen["backend"] == backend
    assert seen["one is plain"], "one worker's weights are not those of the plain program"
    assert seen["two agree"], "two workers end with different weights, or trained nothing together"
    assert seen["resumed"], "a resumed run ends with other weights than one that never stopped"
    assert seen["mean of 3 and 6"] == [[4.5], [4.5]]
    assert "exchanges gradients" in seen["gradients"] and "steps_per_execution=1" in seen["several steps"]
    assert ("make the variables outside of any strategy" in seen["strategy"]) == (backend == "tensorflow")
