# SPDX-License-Identifier: Apache-2.0
"""The examples in real processes, where the frameworks find a launcher's variables and must not start anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import python_path

ROOT = Path(__file__).parents[3]
EXAMPLES = [
    "lightning",
    "transformers",
    pytest.param("fabric", marks=pytest.mark.slow),  # as Lightning's Trainer
    pytest.param("accelerate", marks=pytest.mark.slow),  # as the Trainer of transformers
]


@pytest.mark.processes
@pytest.mark.timeout(420)
@pytest.mark.parametrize("name", EXAMPLES)
def test_two_processes_train_together_and_one_speaks(name: str, tmp_path: Path) -> None:
    pytest.importorskip("lightning" if name == "fabric" else name)
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            "2",
            ROOT / "examples" / "frameworks" / f"with_{name}.py",
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr  # closing a run compares the workers' bits
    found = re.findall(r"workers read (\d+\.\d)% of the test digits right", ended.stdout)
    assert len(found) == 1, ended.stdout
    assert float(found[0]) > 80
