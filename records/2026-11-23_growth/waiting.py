# SPDX-License-Identifier: Apache-2.0
"""What waiting workers could win: the times of grown runs if all N shared the minibatches of the k that train.

A computation, no training: the samples, the blocks and so the model stay the same. In a stage with k of N workers,
N / k of them share each minibatch: they compute (1 + o) step_s / (N / k) each, and all-reduce the gradient at every
step. Their exchanges, and those of the blocks of k groups, are forecast by the planner, as all times of the record are.

    python records/2026-11-23_growth/waiting.py FOLDER      reads FOLDER/plateau.json, writes FOLDER/waiting.json

Effective speed-ups are the record's, times the ratio of both times at equal samples, with the stages of the first seed.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.extend(str(Path(__file__).resolve().parents[2] / "benchmarks" / folder) for folder in ("quality", "common"))

from _quality_methods import Method
from _quality_tasks import TASKS
from _quality_times import Clock

from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.planner import LogNormal, Workload, forecast

STEP_S, PARAMETERS = 0.25, 1_000_000
OVERHEADS = (0.0, 0.2)
"""o, what splitting a minibatch costs, as a share of its time."""
NETWORKS = ("1", "10", "inf")


def step_s(task: str, clock: Clock, workers: int, training: int, overhead: float | None) -> float:
    """A step of a stage; `overhead`: None where the others wait."""
    kind, layout = TASKS[task], Layout.vector(PARAMETERS)
    network = clock._network
    work = Workload(LogNormal(STEP_S), layout, moments=kind.moments)
    alone = forecast(Method.of("grown").rule(kind), work, network, training).step_s
    group = workers // training
    if overhead is None or group < 2:
        return alone
    part = Workload(LogNormal(STEP_S * (1 + overhead) / group), layout, moments=kind.moments)
    return forecast(rule_from_text("sync"), part, network, group).step_s + alone - STEP_S


def seconds(cell: dict[str, Any], gbit: str, overhead: float | None) -> float:
    """Of the stages of a cell."""
    clock = Clock(STEP_S, PARAMETERS, float(gbit))
    return math.fsum(
        count / k * step_s(cell["task"], clock, cell["workers"], int(k), overhead) for k, count, _ in cell["stages"]
    )


def row_of(cell: dict[str, Any]) -> dict[str, Any]:
    """Of a cell: its speed-ups with and without sharing, its time in parts of the time without, and the part of that
    which is spent in stages where workers wait."""
    found: dict[str, Any] = {"task": cell["task"], "workers": cell["workers"], "speedup": {}, "time": {}, "early": {}}
    for gbit in NETWORKS:
        waiting = seconds(cell, gbit, None)
        early = [row for row in cell["stages"] if row[0] < cell["workers"]]
        found["early"][gbit] = round(seconds({**cell, "stages": early}, gbit, None) / waiting, 3)
        shared = {f"{o:g}": seconds(cell, gbit, o) / waiting for o in OVERHEADS}
        found["time"][gbit] = {o: round(ratio, 3) for o, ratio in shared.items()}
        before = cell["effective_speedup"][gbit]
        found["speedup"][gbit] = {"waiting": before, **{o: round(before / ratio, 2) for o, ratio in shared.items()}}
    return found


def main() -> None:
    """All grown cells."""
    folder = Path(sys.argv[1])
    record = json.loads((folder / "plateau.json").read_text(encoding="utf-8").splitlines()[-1])
    cells = [
        cell for cell in record["cells"] if cell["method"] == "grown" and cell["effective_speedup"]["1"] is not None
    ]
    rows = [row_of(cell) for cell in cells]
    for row in rows:
        print(json.dumps(row))
    kinds = ("waiting", *(f"{o:g}" for o in OVERHEADS))

    def median_of(gbit: str, workers: int, kind: str) -> float:
        return round(statistics.median(r["speedup"][gbit][kind] for r in rows if r["workers"] == workers), 2)

    counts = sorted({row["workers"] for row in rows})
    median = {gbit: {str(n): {kind: median_of(gbit, n, kind) for kind in kinds} for n in counts} for gbit in NETWORKS}
    print(json.dumps(median))
    result = {"cells": rows, "median_speedup": median, "step_s": STEP_S, "parameters": PARAMETERS}
    (folder / "waiting.json").write_text(json.dumps(result) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
