# SPDX-License-Identifier: Apache-2.0
"""The example: a trainer of frame classification, before and after."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from c_helpers import DEADLINE_S, environment, run

EPOCHS = "3"
EXAMPLE = Path(__file__).parents[3] / "examples" / "c_tool"

pytestmark = pytest.mark.skipif(
    not EXAMPLE.is_dir() or shutil.which("make") is None, reason="the example is not beside the package, or no make"
)


@pytest.fixture(scope="module")
def tools(prefix: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tools and their data."""
    folder = tmp_path_factory.mktemp("tools")
    config = f"PKG_CONFIG_PATH={prefix}/lib/pkgconfig pkg-config paceline"
    if shutil.which("pkg-config") is None:
        config = f"{sys.executable} -m paceline config --prefix {prefix}"
    run(["make", "-C", EXAMPLE, f"OUT={folder}", f"CONFIG={config}", "all"])
    for name, count, seed in (("training", "30000", "1"), ("heldout", "10000", "2")):
        run([folder / "frames", folder / name, count, seed])
    return folder


def errors(said: str) -> list[float]:
    """Held-out errors in percent."""
    return [float(text) for text in re.findall(r"held-out error ([\d.]+)", said)]


def test_few_lines_change() -> None:
    before, after = ((EXAMPLE / name).read_text().splitlines() for name in ("train.cc", "train_paceline.cc"))
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    assert 0 < sum(line.startswith("+") for line in lines) <= 12


@pytest.mark.slow  # records/2026-11-24_c_tool
@pytest.mark.timeout(400)
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("rule", "limit"), [("bmuf", 1.02), pytest.param("averaging", 1.05, marks=pytest.mark.slow)])
def test_workers_reach_the_error_of_one(tools: Path, tmp_path: Path, rule: str, limit: float, count: int) -> None:
    """Averaging lags in so short a training: +3.0 % with 4 workers."""
    data = [str(tools / "training"), str(tools / "heldout")]
    alone = errors(run([tools / "train", *data, tmp_path / "one.model", EPOCHS]))
    command = [sys.executable, "-m", "paceline", "run", "--workers", str(count), "--rule", f"{rule}(period=8)"]
    done = subprocess.run(
        [*command, "--log", str(tmp_path / "log"), str(tools / "train_paceline"), *data, str(tmp_path / "model"),
         EPOCHS],
        env=environment(), capture_output=True, text=True, timeout=DEADLINE_S * 2,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    together = errors(done.stdout)
    assert len(alone) == len(together) == int(EPOCHS)
    assert together[-1] <= limit * alone[-1] and alone[-1] < alone[0] < 35
    assert (tmp_path / "model").stat().st_size == (tmp_path / "one.model").stat().st_size


@pytest.mark.timeout(400)
def test_the_others_go_on_without_a_killed_worker(tools: Path, tmp_path: Path) -> None:
    """Under `asgd`, after the first epoch."""
    log, data = tmp_path / "log", [str(tools / "training"), str(tools / "heldout")]
    command = [sys.executable, "-m", "paceline", "run", "--workers", "3", "--rule", "asgd(period=8)", "--log", str(log)]
    with subprocess.Popen(
        [*command, str(tools / "train_paceline"), *data, str(tmp_path / "model"), EPOCHS],
        env=environment(COLUMNS="200"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            first = next(line for line in process.stdout if "epoch 1" in line)
            with (log / "rank-001.jsonl").open() as lines:
                os.kill(json.loads(next(lines))["pid"], signal.SIGKILL)
            said, problems = process.communicate(timeout=DEADLINE_S * 2)
        finally:
            process.kill()
    assert process.returncode == 3, said + problems
    assert "2 workers finished here" in problems and "without 1" in problems and "SIGKILL" in problems
    found = errors(first + said)
    assert len(found) == int(EPOCHS) and found[-1] < min(found[0], 35)
    assert (tmp_path / "model").stat().st_size > 0
