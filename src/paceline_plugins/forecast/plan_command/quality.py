# SPDX-License-Identifier: Apache-2.0
"""The forecast of quality as a table, in sentences and as JSON, and the last sentence of `paceline plan`."""

from __future__ import annotations

import math
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
from paceline_plugins.forecast.planner.forecast import Forecast, forecast
from paceline_plugins.forecast.planner.network import Network
from paceline_plugins.forecast.planner.observed import loss_name, observed
from paceline_plugins.forecast.planner.quality import Quality, forecast_quality, most_that_pay
from paceline_plugins.forecast.planner.workload import Workload

FARTHEST = 16
"""Times the workers of the run: beyond, the run tells too little."""
SHOWN = (4, 8, 16, 32, 64)


@dataclass(frozen=True)
class QualityForecast:
    """What other numbers of workers would make of the samples of a run."""

    run: RunLog  # the log
    rule: Rule  # of the run
    loss: str  # the name of what is forecast
    # speed-up and quality of each number of workers; a speed-up is k where no network is given
    rows: Sequence[tuple[float, Quality]]
    pays_up_to: int | None  # the most workers that pay; None where all do that can be forecast
    alone: Quality  # of one worker with the same samples

    @property
    def sentence(self) -> str:
        """Up to how many workers pay, and the losses."""
        most = FARTHEST * self.run.size
        if self.pays_up_to is None:
            pay = f"Up to {most} workers pay, the most that a run of {self.run.size} can forecast."
        else:
            pay = f"More than {self.pays_up_to} workers will not pay: each is worth less than half a worker."
        shown = [quality for _, quality in self.rows if quality.workers in (*SHOWN, self.run.size)]
        most_shown = 2 * next((one.loss for one in shown if one.workers == self.run.size), math.inf)
        likely = [one for one in shown if one.loss <= most_shown]  # more is beyond what the curve tells
        texts = [f"{value_text(quality.loss)} with {quality.workers}" for quality in likely]
        texts += [f"over {value_text(most_shown)} with {one.workers} or more" for one in shown[len(likely) :][:1]]
        losses = ", ".join(texts)
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


def of_time(work: Workload, network: Network, rule: Rule, workers: int) -> float:
    """The speed-up of k workers."""
    return forecast(rule, work, network, workers).speed_up


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


# Will it pay? One sentence at the end of `paceline plan`, about speed and about what the model learns.

SMALL = 1.05
"""A speed-up below this is none."""
HOW = (
    "what the model learns is not known: run `paceline run --workers 2 --rule bmuf --log trial PROGRAM` (bmuf_adam for "
    "Adam), and give --log trial here"
)


def sentence(asked: Forecast, quality: QualityForecast | None) -> str:
    """How much faster so many workers are, how much worse the model, and from where on more of them are in vain.

    Args:
        asked: of the recommended rule, at the number of workers that was asked for.
        quality: from the log of a run, or None.
    """
    workers = asked.workers
    if quality is None:
        return f"{_speed(workers, asked.speed_up)}; {HOW}."
    found = {one.workers: (speed_up, one.loss) for speed_up, one in quality.rows}
    if workers not in found:
        most = max(found)
        learns = f"what they learn is not known, since a run of {quality.run.size} tells of at most {most}"
        return f"{_speed(workers, asked.speed_up)}; {learns}{_beyond(quality)}."
    speed_up, loss = found[workers]
    return f"{_speed(workers, speed_up)}, {_loss(quality.loss, loss, quality.alone.loss)}{_beyond(quality)}."


def _speed(workers: int, speed_up: float) -> str:
    count = "1 worker" if workers == 1 else f"{workers} workers"
    if workers > 1 and speed_up < SMALL:
        return f"{count}: no faster than one ({speed_up:.2g} times)"
    return f"{count}: {speed_up:.2g} times as fast" if speed_up < 9.95 else f"{count}: {speed_up:.0f} times as fast"


def _loss(name: str, loss: float, alone: float) -> str:
    """The loss, as a share of what one worker would reach with the same samples."""
    if not (alone > 0 and math.isfinite(loss) and math.isfinite(alone)):
        return f"{name} {loss:.4g} instead of {alone:.4g}"
    percent = max(1, math.ceil(100 * (loss / alone - 1) - 1e-9))
    return f"{name} within {percent} % of one worker's"


def _beyond(quality: QualityForecast) -> str:
    if quality.pays_up_to is None:
        return ""
    return f"; beyond {quality.pays_up_to} workers, each is worth less than half of one"
