# SPDX-License-Identifier: Apache-2.0
"""Our figures for the claims of articles, read from the JSON files of records: what `claims.json` may compute with."""

from __future__ import annotations

import json
import math
from functools import cache, reduce
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.planner import LogNormal, Workload, forecast, network_from_text

RECORDS = Path(__file__).resolve().parents[2] / "records"
SMALL = ("small-sgd", "small-adam", "small-lines")
NETWORK = f"link(mbit={10_000 * 1448 / 1538}, ms=0.05)"
"""Of all computed speeds: Ethernet of 10 Gbit/s less headers, one worker a host."""
STEP_S, PARAMETERS, SPREAD = 0.25, 10_000_000, 0.01
"""Their model, and by how much step times vary over their mean."""
DDL_NETWORK = "link(mbit=93000, ms=0.005, per_host=4, within_mbit=300000, within_ms=0.005)"
"""64 hosts with 100 Gbit/s InfiniBand and four P100 on NVLink each."""
DDL_STEP_S, RESNET = 0.2, 25_557_032
"""ResNet-50 with 32 pictures: 90 passes over 1.28 M in the article's 50 minutes at 95 % make 158 pictures a second."""


@cache
def text(record: str, name: str) -> str:
    """A file of a record."""
    return (RECORDS / record / name).read_text(encoding="utf-8")


class Figures:
    """What an expression of `claims.json` may call; files are those of the claim's record.

    Args:
        record: folder in `records`.
    """

    def __init__(self, record: str) -> None:
        self.record = record

    def value(self, expression: str) -> float:
        """Evaluate the expression."""
        public = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        known = {"SMALL": SMALL, "RESNET": RESNET, "mean": fmean, "median": median, "sqrt": math.sqrt}
        return float(eval(expression, {**known, **public}))

    def of(self, record: str) -> Figures:
        """The same of another record."""
        return Figures(record)

    def read(self, name: str) -> Any:
        """A JSON file, or one of a JSON object a line."""
        whole = text(self.record, name)
        return [json.loads(line) for line in whole.splitlines()] if name.endswith("l") else json.loads(whole)

    def cells(self, name: str, /, **where: Any) -> list[dict[str, Any]]:
        """Rows of a table that have these values."""
        table = self.read(name)
        every = (
            table
            if isinstance(table, list)
            else next(table[key] for key in ("cells", "trainings", "written") if key in table)
        )
        rows = [row for row in every if all(row[key] == value for key, value in where.items())]
        if not rows:
            raise SystemExit(f"{self.record}/{name} has no cell with {where}: was the record made again?")
        return rows

    def mean_of(self, name: str, path: str, /, **where: Any) -> float:
        """The mean over all rows that have these values of what is at a path such as `forward/beam/bleu`."""
        return fmean(reduce(lambda row, key: row[key], path.split("/"), row) for row in self.cells(name, **where))

    # -- speeds

    def speed(self, rule: str, workers: int, parameters: int = PARAMETERS, step_s: float = STEP_S) -> float:
        """Times one worker's, by the planner; Adam's rules send its two moments, too."""
        work = Workload(LogNormal(step_s, SPREAD), Layout.vector(parameters), moments=2 if "adam" in rule else 0)
        return forecast(rule_from_text(rule), work, network_from_text(NETWORK), workers).speed_up

    def ddl(self, spread: float) -> float:
        """Efficiency of 256 GPUs."""
        work = Workload(LogNormal(DDL_STEP_S, spread), Layout.vector(RESNET))
        return forecast(rule_from_text("sync"), work, network_from_text(DDL_NETWORK), 256).efficiency

    def sooner(self, name: str, task: str, workers: int) -> float:
        """One worker's time over a grown run's to the same quality; 1 M numbers at 1 Gbit/s, as 10 M at 10."""
        return float(self.cells(name, task=task, method="grown", workers=workers)[0]["effective_speedup"]["1"])

    # -- losses over one worker's, as shares

    def loss(self, name: str, method: str, workers: int, task: str = "frames-sgd", key: str = "over_serial") -> float:
        """Of `time_to_quality.py`; or of its errors."""
        return self.mean_of(name, key, task=task, method=method, workers=workers)

    def blocks(self, method: str, workers: int, name: str = "table.json") -> float:
        """Of `blocks.py`."""
        table = self.read(name)
        return fmean(table["each"][method][str(workers)]) / fmean(table["serial_each"]) - 1

    def line(self, method: str, workers: int, over: str, name: str = "table.json") -> float:
        """Errors of a method of the record of lines over those of another (of one worker: `serial`)."""
        count = 1 if over.startswith("serial") else workers
        mine, other = (self.mean_of(name, "error", method=m, workers=n) for m, n in ((method, workers), (over, count)))
        return mine / other - 1

    def tool(self, rule: str, workers: int) -> float:
        """Errors of the C++ tool over those of the tool alone, each at the best of its rates."""
        table = self.read("workers.json")
        mine, alone = (
            min(map(fmean, by.values())) for by in (table["error"][rule][str(workers)], table["error_alone"])
        )
        return mine / alone - 1
