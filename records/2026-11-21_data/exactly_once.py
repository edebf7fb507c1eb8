# SPDX-License-Identifier: Apache-2.0
"""Exactly once at n = 100,000: `paceline run` with workers that are killed, fewer workers, more workers.

    python exactly_once.py RESULTS.jsonl [RULE ...]

Runs tests/processes/counting.py and writes a line for each launch: how the workers ended, and how many numbers of the
model are not what every sample of every epoch, once, would have made.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "processes" / "counting.py"
BASE = {"samples": 100_000, "batch": 50, "epochs": 2, "pauses": [0.001, 0.002, 0.0035, 0.005]}
DEADLINE_S = 240


def free(rule: str, **more: Any) -> list[tuple[int, dict[str, Any]]]:
    """Workers that go on unevenly: the others go on without the killed ones; rank N - 1 keeps the ledger."""
    stage = {**BASE, "rule": rule, **more}
    return [
        (4, {**stage, "kills": {"1": [300, "before"], "3": [100, "after"]}}),
        (4, {**stage, "stop": 200, "save": "four"}),
        (3, {**stage, "resume": "four", "stop": 300, "save": "three"}),
        (7, {**stage, "resume": "three", "kills": {"6": [60, "before"], "0": [150, "after"]}}),
    ]


def even(rule: str, **more: Any) -> list[tuple[int, dict[str, Any]]]:
    """Workers that go on evenly: the run ends with the killed ones, and goes on from its last checkpoint."""
    stage = {**BASE, "rule": rule, **more}
    return [
        (4, {**stage, "every": 110, "save": "four", "kills": {"1": [400, "before"], "3": [400, "after"]}}),
        (3, {**stage, "resume": "four", "stop": 500, "save": "three"}),
        (7, {**stage, "resume": "three"}),
    ]


ROWS = {
    "asgd": free("asgd"),
    "asgd, loader processes": free("asgd", loaders=1),
    "sync": even("sync"),
    "bmuf": even("bmuf(period=3)"),
    "bmuf, no momentum": even("bmuf(period=3, momentum=0.0, lr=1.0)"),
}


QUICK = {
    "asgd": [(2, {**BASE, "rule": "asgd", "samples": 1_000, "epochs": 1, "kills": {"1": [4, "after"]}})],
    "sync": [(2, {**BASE, "rule": "sync", "samples": 1_000, "epochs": 1})],
}


def launch(workers: int, stage: dict[str, Any], directory: Path) -> dict[str, Any]:
    """One launch, and what its workers said."""
    stage = {key: str(directory / value) if key in ("save", "resume") else value for key, value in stage.items()}
    path = directory / "stage.json"
    path.write_text(json.dumps(stage))
    command = [sys.executable, "-m", "paceline", "run", "--quiet", "--overwrite", "--log", str(directory / "log")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    began = time.monotonic()
    ended = subprocess.run(
        [*command, "--workers", str(workers), "--rule", stage["rule"], str(PROGRAM), str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    said = [json.loads(line.split("ENDED", 1)[1]) for line in ended.stdout.splitlines() if "ENDED" in line]
    return {
        "workers": workers,
        "killed": sorted(stage.get("kills", {})),
        "code": ended.returncode,
        "seconds": round(time.monotonic() - began, 1),
        "steps": {one["rank"]: one["steps"] for one in said},
        "wrong": sorted({one["wrong"] for one in said}),
        "excess": sorted({one["excess"] for one in said}),
    }


def forked(workers: int, stage: dict[str, Any], directory: Path) -> dict[str, Any]:
    """As `launch`, for the quick form: one process loads torch and forks the workers."""
    (directory / "phases.json").write_text(json.dumps([[workers, stage]]))
    command = [sys.executable, "-m", "tests.processes.forked", str(directory / "phases.json"), str(directory)]
    subprocess.run(command, check=True, timeout=DEADLINE_S)
    ended = json.loads((directory / "ended.json").read_text())[0]
    said = [json.loads(text.split("ENDED", 1)[1]) for _, text in ended]
    return {"workers": workers, "code": max(code for code, _ in ended), "wrong": sorted({one["wrong"] for one in said})}


def main() -> None:
    """All rows, or those that are named."""
    rows = QUICK if "--quick" in sys.argv else ROWS
    with open(sys.argv[1], "a") as results:
        for name in [word for word in sys.argv[2:] if word != "--quick"] or rows:
            with tempfile.TemporaryDirectory() as directory:
                start = forked if rows is QUICK and name == "sync" else launch
                for workers, stage in rows[name]:
                    found = {"row": name, "rule": stage["rule"], **start(workers, stage, Path(directory))}
                    print(json.dumps(found), file=results, flush=True)
                    if rows is QUICK and found["wrong"] != [0]:
                        raise SystemExit(f"samples are lost or repeated: {found}")


if __name__ == "__main__":
    main()
