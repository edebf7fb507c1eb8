# SPDX-License-Identifier: Apache-2.0
"""The event log of a run as what a forecast of quality needs (:mod:`.quality`)."""

from __future__ import annotations

import numpy as np

from paceline.errors import RuleError
from paceline.observe.reports.events import ExchangeEvent, Value
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.rules.rule import Rule
from paceline_plugins.forecast.planner.quality import (
    ObservedRun,
    Points,
    correlation,
    effective_of,
    fitted_alpha,
    gain_share,
)


def observed(run: RunLog, rule: Rule) -> ObservedRun:
    """What the log of a run under this rule tells.

    Raises:
        RuleError: the log has no effective workers, no loss, or is not of a run from its beginning.
    """
    log = max((worker for worker in run.workers if not worker.inherited), key=_told, default=None)
    if log is None:
        raise RuleError(f"the run in {run.directory} continues another one; give the log of a run from its beginning")
    if not _told(log):
        raise RuleError(
            f"the log in {run.directory} does not tell how many workers all are worth: give that of a run of 2 workers "
            'or more under a rule with blocks, such as "bmuf", with its guard against outliers on'
        )
    name = loss_name(run)
    final = run.last(name)
    if final is None or not final > 0:
        raise RuleError(f"the forecast needs a {name} above 0, got {final} in the end")
    workers, alike = _workers(log, run.size), _correlations(log, run.size)
    made = [n * line.minibatches for n, line in zip(workers, log.exchanges, strict=True)]
    shares = [
        min(effective_of(c, n) / n, gain_share(rule, n)(max(1, line.block - line.exchanges // 2)))
        for c, n, line in zip(alike, workers, log.exchanges, strict=True)
    ]
    minibatches, progress = np.cumsum(made, dtype=np.float64), np.cumsum(np.multiply(made, shares))
    made_by_then, losses = _losses(run, name)
    along = np.interp(made_by_then, [0.0, *minibatches], [0.0, *progress])
    return ObservedRun(run.size, minibatches, progress, alike, final, fitted_alpha(made_by_then, along, losses))


def _losses(run: RunLog, name: str) -> tuple[Points, Points]:
    """Minibatches of all workers when a loss was reported, and the mean of the workers that reported it there."""
    reports = [(worker.began_s + one.at_s, one) for worker in run.workers for one in worker.values if one.name == name]
    at_s = np.array([at for at, _ in reports])
    made = sum((np.interp(at_s, *_made(worker)) for worker in run.workers), np.zeros(len(reports)))
    _, group, sizes = np.unique([one.total_minibatches for _, one in reports], return_inverse=True, return_counts=True)
    x, y = (np.bincount(group, weights=row) / sizes for row in (made, [one.value for _, one in reports]))
    order = np.argsort(x, kind="stable")
    return x[order], y[order]


def _made(worker: WorkerLog) -> tuple[list[float], list[float]]:
    """Times of a worker's events, and the minibatches that it had made by then."""
    made: dict[float, float] = {worker.began_s: 0.0}
    lines: list[ExchangeEvent | Value] = [*worker.exchanges, *worker.values]
    for line in lines:
        at_s = worker.began_s + line.at_s
        made[at_s] = max(made.get(at_s, 0.0), float(line.total_minibatches - worker.inherited))
    return sorted(made), [made[at_s] for at_s in sorted(made)]


def _workers(log: WorkerLog, size: int) -> list[int]:
    """N at each line; it varies in an elastic run."""
    sizes = {one.number: one.size for one in log.generations}
    return [sizes.get(line.generation, size) for line in log.exchanges]


def _told(log: WorkerLog) -> int:
    """Lines that tell how many workers all are worth."""
    return sum(line.effective_workers is not None for line in log.exchanges)


def _correlations(log: WorkerLog, size: int) -> Points:
    """c at each line; where it tells none that of the line before, and before the first the first."""
    places, found = [], []
    for place, (line, n) in enumerate(zip(log.exchanges, _workers(log, size), strict=True)):
        if line.effective_workers is not None and n > 1:
            places.append(place)
            found.append(correlation(min(max(1.0, line.effective_workers), n), n))
    latest = np.searchsorted(places, np.arange(len(log.exchanges)), side="right") - 1
    return np.array(found)[np.maximum(latest, 0)]


def loss_name(run: RunLog) -> str:
    """The reported value that is forecast: the first with `loss` in its name."""
    names = [name for name in run.value_names if "loss" in name.lower()]
    if not names:
        raise RuleError(f"the run in {run.directory} reports no loss: add run.log(loss=loss.item()) to the program")
    return names[0]


def step_s(run: RunLog) -> float | None:
    """Seconds of a minibatch on one worker; None where the log has no time."""
    made = sum(line.minibatches for worker in run.workers for line in worker.exchanges)
    spent = sum(worker.compute_s for worker in run.workers)
    return spent / made if made and spent > 0 else None
