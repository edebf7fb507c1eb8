# SPDX-License-Identifier: Apache-2.0
"""Trainings for `quality_meter.py`: a run with few workers as its log would be, and what its log forecasts of many."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from _lines_reader import held_out, line_error
from _lines_reader import loss_of as line_loss
from _quality_tasks import Task, start
from torch import nn

from paceline.observe.reports.events import ExchangeEvent, Value
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.rules.recipes import rule_from_text
from paceline.rules.rule import Rule
from paceline.rules.schedule.growth import rate_factor
from paceline_plugins.forecast.planner.observed import observed
from paceline_plugins.forecast.planner.quality import ObservedRun, Quality, forecast_quality
from paceline_plugins.forecast.vectorised.vectorised import StackedWorkers

Row = dict[str, Any]


def rule_of(task: Task) -> Rule:
    """Today's recipe for its optimizer."""
    return rule_from_text(f"{task.recipe}(period={task.period})")


def train(task: Task, workers: int, minibatches: int, seed: int, folder: Path) -> Row:
    """Make a training with a fixed number of workers.

    Returns:
        `loss` (held out), and by block `effective` and `losses`, the mean loss of its minibatches.
    """
    model, optimizer = start(task, seed)
    group = StackedWorkers(model, task.loss, optimizer, rule_of(task), workers, measures=True)
    source, losses, effective = task.batches(folder, minibatches, seed), [], []
    for step in range(minibatches // workers):
        batch = tuple(torch.stack(column) for column in zip(*islice(source, workers), strict=True))
        factor = rate_factor(workers) * task.factor((step + 0.5) * workers / minibatches)
        losses.append(float(group.step(batch, factor, task.largest_gradient).mean()))
        if not group.in_block:
            effective.append(round(group.effective, 4))
    model.load_state_dict(group.finish()[0], strict=False)
    means = [float(part.mean()) for part in torch.tensor(losses).split(task.period)]
    return {"loss": held_out_loss(task, model, folder), "effective": effective, "losses": means[: len(effective)]}


@torch.no_grad()
def held_out_loss(task: Task, model: nn.Module, folder: Path) -> float:
    """In nats; the task of lines is judged by its error, which is no loss."""
    if task.judge is not line_error:
        return task.judge(model, folder)
    lines, pictures = held_out(folder)
    parts = zip(*(tensor.split(256) for tensor in (pictures, lines.numbers, lines.lengths)), strict=True)
    return sum(float(line_loss(model, *part)) * len(part[0]) for part in parts) / len(pictures)


def log_of(task: Task, row: Row, workers: int) -> RunLog:
    """What the event log of this training would be."""
    exchanges = [
        ExchangeEvent(block, block, 1, task.period, block * task.period, effective_workers=effective)
        for block, effective in enumerate(row["effective"], 1)
    ]
    values = [
        Value(line.at_s, "loss", loss, line.total_minibatches)
        for line, loss in zip(exchanges, row["losses"], strict=True)
    ]
    attach = {"size": workers, "rule": rule_of(task).text()}
    logs = [WorkerLog(Path(), rank, attach, exchanges=exchanges, values=values) for rank in range(workers)]
    return RunLog(Path(), 1, logs)


def forecasts(task: Task, row: Row, workers: int, others: list[int]) -> list[Quality]:
    """Of the held-out loss with other numbers of workers, from this training's log and its held-out loss."""
    rule = rule_of(task)
    run: ObservedRun = replace(observed(log_of(task, row, workers), rule), loss=row["loss"])
    return [forecast_quality(run, other, rule) for other in others]
