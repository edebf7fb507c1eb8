# SPDX-License-Identifier: Apache-2.0
"""The forecast of quality as a table, in sentences and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.table import Table
from rich.text import Text

from paceline.observe.reports.log import RunLog
from paceline.observe.reports.summary import value_text
from paceline.rules.recipes import rule_from_text
from paceline.rules.rule import Rule
from paceline_plugins.forecast.planner.forecast import forecast
from paceline_plugins.forecast.planner.network import Network
from paceline_plugins.forecast.planner.observed import loss_name, observed
from paceline_plugins.forecast.planner.quality import Quality, forecast_quality, most_that_pay
from paceline_plugins.forecast.planner.workload import Conditions, Workload

FARTHEST = 16
"""Times the workers of the run: beyond, the run tells too little."""
SHOWN = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class QualityForecast:
    """What other numbers of workers would make of the samples of a run.

    Attributes:
        run: the log.
        rule: of the run.
        loss: the name of what is forecast.
        rows: speed-up and quality of each number of workers; a speed-up is k where no network is given.
        pays_up_to: the most workers that pay; None where all do that can be forecast.
        alone: of one worker with the same samples.
    """

    run: RunLog
    rule: Rule
    loss: str
    rows: Sequence[tuple[float, Quality]]
    pays_up_to: int | None
    alone: Quality

    @property
    def sentence(self) -> str:
        """Up to how many workers pay, and the losses."""
        most = FARTHEST * self.run.size
        if self.pays_up_to is None:
            pay = f"Up to {most} workers pay, the most that a run of {self.run.size} can forecast."
        else:
            pay = f"More than {self.pays_up_to} workers will not pay: each is worth less than half a worker."
        shown = [quality for _, quality in self.rows if quality.workers in (*SHOWN, self.run.size)]
        losses = ", ".join(f"{value_text(quality.loss)} with {quality.workers}" for quality in shown)
        return f"{pay} Forecast {self.loss} at the samples of this run: {losses}."

    def table(self) -> Table:
        """A row for each number of workers."""
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        for name in ("workers", "speed-up", "effective", "worth", self.loss):
            table.add_column(Text(name), justify="right", no_wrap=True)
        for speed_up, quality in self.rows:
            worth = speed_up * quality.effective / quality.workers
            numbers = (f"{speed_up:.2f}", f"{quality.effective:.1f}", f"{worth:.1f}", value_text(quality.loss))
            table.add_row(str(quality.workers), *numbers)
        return table

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "log": str(self.run.directory),
            "rule": self.rule.text(),
            "workers": self.run.size,
            "loss": self.loss,
            "pays_up_to": self.pays_up_to,
            "forecasts": [
                {
                    "workers": quality.workers,
                    "speed_up": speed_up,
                    "effective_workers": quality.effective,
                    "loss": quality.loss,
                }
                for speed_up, quality in self.rows
            ],
        }


def of_time(work: Workload, network: Network, conditions: Conditions, rule: Rule, workers: int) -> float:
    """The speed-up of k workers."""
    return forecast(rule, work, network, workers, conditions).speed_up


def quality_forecast(
    run: RunLog, counts: Sequence[int] = SHOWN, speed_up: Callable[[Rule, int], float] | None = None
) -> QualityForecast:
    """Forecast from a run's log.

    Args:
        run: the log.
        counts: numbers of workers; those beyond `FARTHEST` times the run's are left out, the run's is added.
        speed_up: of so many workers under the run's rule; None where a network is not known, so that k are k times as
            fast.

    Raises:
        RuleError: the log does not have what a forecast needs.
    """
    rule = rule_from_text(run.rule)
    found, name = observed(run, rule), loss_name(run)
    faster: Callable[[int], float] = partial(speed_up, rule) if speed_up is not None else float

    def worth(workers: int) -> float:
        return faster(workers) * forecast_quality(found, workers, rule).effective / workers

    most = FARTHEST * run.size
    chosen = sorted({count for count in counts if count <= most} | {run.size})
    pays = most_that_pay(worth, most)
    rows = [(faster(count), forecast_quality(found, count, rule)) for count in chosen]
    alone = forecast_quality(found, 1, rule)
    return QualityForecast(run, rule, name, rows, pays if pays < most else None, alone)
