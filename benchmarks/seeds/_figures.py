# SPDX-License-Identifier: Apache-2.0
"""Our figures for the claims of articles, read from the files of a record: what `claims.json` may compute with."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.planner import LogNormal, Workload, forecast, network_from_text

RECORDS = Path(__file__).resolve().parents[2] / "records"
SMALL = ("small-sgd", "small-adam", "small-lines")
DDL_NETWORK = "link(mbit=93000, ms=0.005, per_host=4, within_mbit=300000, within_ms=0.005)"
"""64 hosts with 100 Gbit/s InfiniBand and four P100 on NVLink each."""
DDL_STEP_S, DDL_PARAMETERS = 0.2, 25_557_032
"""ResNet-50 with 32 pictures: 90 passes over 1.28 M in the article's 50 minutes at 95 % make 158 pictures a second."""
DDL_SPREAD = 0.01  # of step times over their mean; the article has none, and at 2 % it is 93 %


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

    def value(self, expression: str) -> float | None:
        """Evaluate the expression; None where nothing was measured."""
        public = {name: getattr(self, name) for name in dir(self) if not name.startswith("_")}
        found = eval(expression, {"SMALL": SMALL, "mean": fmean, **public})
        return None if found is None else float(found)

    def read(self, name: str) -> Any:
        """A JSON file."""
        return json.loads(text(self.record, name))

    def cells(self, name: str, **where: Any) -> list[dict[str, Any]]:
        """Rows of a table that have these values."""
        table = self.read(name)
        every = table if isinstance(table, list) else table.get("cells") or table["trainings"]
        found = [row for row in every if all(row[key] == value for key, value in where.items())]
        if not found:
            raise SystemExit(f"{self.record}/{name} has no cell with {where}: was the record made again?")
        return found

    def cell(self, name: str, key: str, **where: Any) -> float:
        """A value of the one cell that has these values."""
        (found,) = self.cells(name, **where)
        return float(found[key])

    def mean_of(self, name: str, key: str, **where: Any) -> float:
        """The mean of a value over all rows that have these values."""
        return fmean(row[key] for row in self.cells(name, **where))

    def speed(self, name: str, gbit: str, **where: Any) -> float:
        """One worker's time over that of N workers for as many samples, exchanges included."""
        return 1 / float(self.cells(name, **where)[0]["seconds_over_serial"][gbit])

    def loss(self, name: str, method: str, workers: int, task: str = "frames-sgd") -> float:
        """Held-out loss over one worker's."""
        return self.cell(name, "over_serial", task=task, method=method, workers=workers)

    def best_sync(self, name: str, **where: Any) -> float:
        """Loss over one worker's of synchronous training at the best of its rates."""
        rows = [row for row in self.cells(name, **where) if row["method"].startswith("sync")]
        return float(min(row["over_serial"] for row in rows if row["over_serial"] is not None))

    def stated(self, pattern: str, record: str = "") -> float:
        """A figure that a record's README states."""
        found = re.search(pattern, text(record or self.record, "README.md"))
        if found is None:
            raise SystemExit(f"{record or self.record}/README.md states nothing like {pattern!r}")
        return float(found[1])

    def miscounted(self) -> int:
        """Samples that were lost or repeated in all runs of the counting record."""
        row = r"^\| `[^|]+` \| \d+ \| \d+ \| (\d+) \| (\d+) \| \d+ \|$"
        rows = re.findall(row, text(self.record, "README.md"), re.MULTILINE)
        if len(rows) != 4:
            raise SystemExit(
                f"{self.record}/README.md has {len(rows)} rows of counts, not 4: was the record made again?"
            )
        return sum(int(count) for row in rows for count in row)

    def dual(self, method: str, decoding: str) -> float:
        """Exact sentences: mean of both directions and all seeds, with one worker."""
        rows = self.cells("trainings.json", method=method, workers=1)
        return fmean(row[way][decoding]["exact"] for row in rows for way in ("forward", "backward"))

    def sentiment(self, constrained: bool) -> float:
        """Share of words of sentiment in reviews that were written at temperature 0.7, mean of the seeds."""
        rows = self.read("writing_seeds.json")["written"]
        return fmean(row["written"]["0.7"]["sentiment"] for row in rows if (row["name"] != "plain") == constrained)

    def delayed(self, key: str, best: Callable[..., float], rate: float, *kinds: str) -> float:
        """The best of some ways to train a CNN with 8 workers.

        Of each way the cell that has the most seeds counts: the strength was chosen with the first of them.
        """
        found = []
        for kind in kinds:
            cells = self.cells("table.json", method=kind, rate=rate, workers=8, minibatches=20_480)
            found.append(max(cells, key=lambda cell: len(cell["seeds"]))[key] or 0.0)
        return best(found)

    def gap_closed(self, task: str, way: str, workers: int) -> float:
        """Share of what `asgd` loses with geometric delays that a rule wins back."""
        rows = [json.loads(line) for line in text(self.record, "results.jsonl").splitlines()]
        rows = [row for row in rows if row["task"] == task and row["minibatches"] in (3200, 5760)]
        rows = [row for row in rows if row["delays"] in (None, "geometric")]

        def loss(way: str, workers: int) -> float:
            return fmean(row["loss"] for row in rows if row["way"] == way and row["workers"] == workers)

        alone, plain = loss("sequential", 1), loss("asgd", workers)
        return (plain - loss(way, workers)) / (plain - alone)

    def ddl_efficiency(self) -> float:
        """Of 256 GPUs, as the planner forecasts it."""
        work = Workload(LogNormal(DDL_STEP_S, DDL_SPREAD), Layout.of([(1, DDL_PARAMETERS)]))
        return forecast(rule_from_text("sync"), work, network_from_text(DDL_NETWORK), 256).efficiency
