# SPDX-License-Identifier: Apache-2.0
"""Real processes that are killed in the middle of things: the benchmark, made short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.nursery import ROOT
from tests.paths import python_path

RULES = ["bmuf_adam(period=3)"]
"""The benchmark's own table has them all."""


@pytest.mark.claim
@pytest.mark.processes
def test_killed_and_resumed_to_the_same_bits(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/faults/resume.py", "--points", "1", "--directory", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": python_path(), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, "--recipes", *RULES], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == len(RULES) and found["differing"] == 0 and found["resumed"] > 0, done.stderr[-3000:]
