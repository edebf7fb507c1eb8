# SPDX-License-Identifier: Apache-2.0
"""The example of a closed tool: four workers by files end as one worker does, and a killed run with the same bytes."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import paceline
from paceline.errors import DataError
from paceline_plugins.files.plan import Plan
from paceline_plugins.files.worker import train
from tests.doors.files.plans import plan

EXAMPLE = Path(__file__).parents[2] / "examples" / "file_blocks"
COMPILER = shutil.which("c++")
PARTS, EPOCHS = 16, 5

if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)

pytestmark = [pytest.mark.processes, pytest.mark.skipif(COMPILER is None, reason="there is no c++ here")]


def tool(*words: object) -> str:
    return subprocess.run(["./train", *map(str, words)], capture_output=True, text=True, check=True).stdout


def error(model: str) -> float:
    found = re.search("error=([0-9.]+)", tool("--in", model, "--held-out", "held_out.txt"))
    assert found is not None
    return float(found[1])


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """The command of the example's page, for fewer epochs."""
    monkeypatch.chdir(tmp_path)
    assert COMPILER is not None
    subprocess.run(
        [COMPILER, "-O2", "-Wall", "-Wextra", "-Werror", "-o", "train", str(EXAMPLE / "train.cc")], check=True
    )
    Path("samples.txt").write_text(tool("--make-data", 4000, 1))
    Path("held_out.txt").write_text(tool("--make-data", 2000, 2))
    files = ["--in", "{model}", "--out", "{model_out}", "--samples", "{list}"]
    command = ["./train", *files, "--lr", "{lr}", "--seed", "{seed}", "--held-out", "held_out.txt"]
    data = {"data": str(Path("samples.txt").absolute()), "parts": PARTS, "epochs": EPOCHS}
    rates = {"lr": 0.05, "lr_final": 0.002, "loss": "loss=([0-9.]+)"}
    made = plan(command=command, layout="f32", rule="bmuf(reproducible=True)", **data, **rates)
    tool("--init", 3, "model.bin")
    return made


@pytest.mark.slow  # records/2026-11-23_file_blocks
def test_four_workers_by_files_end_as_one_does(asked: Plan) -> None:
    paceline.simulate(lambda: train(asked), 1)
    alone = error("out.bin")
    shutil.rmtree("work")
    Path("work").mkdir()
    failing = dataclasses.replace(asked, command=["sh", "-c", '[ {block} -lt 9 ] && exec "$@"', "sh", *asked.command])
    with pytest.raises(DataError, match=r"block 10, part .* ended with exit code 1"):
        paceline.simulate(lambda: train(failing), 4)
    paceline.simulate(lambda: train(asked), 4)
    continued = Path("out.bin").read_bytes()
    assert error("out.bin") <= 1.02 * alone, "4 workers of 1"
    shutil.rmtree("work")
    Path("work").mkdir()
    paceline.simulate(lambda: train(asked), 4)
    assert Path("out.bin").read_bytes() == continued, "as if it had never stopped"
