# SPDX-License-Identifier: Apache-2.0
"""The inputs of `paceline plan`: numbers that were given, or measured on a program's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from paceline.errors import RuleError
from paceline.forecast.planner.busy import OtherProcesses
from paceline.forecast.planner.stopwatch import Timed, time_script
from paceline.forecast.planner.stragglers import LogNormal, StepTimes, step_times, times_from_text
from paceline.forecast.planner.workload import Workload
from paceline.observe.reports.summary import seconds_text
from paceline.rules.codec import Layout

EPOCH = 1000.0


@dataclass(frozen=True)
class PlanInputs:
    """The options about the workload; see `paceline plan --help`. None where not given."""

    script: Path | None
    arguments: list[str]
    step_s: float | None
    parameters: int | None
    moments: int | None
    epoch: float | None
    spread: float | None
    times: Path | None
    codec_s: float
    pack_s: float
    steps: int
    timeout_s: float


def workload(asked: PlanInputs, notes: Console) -> Workload:
    """The workload; given numbers take precedence over measured ones."""
    given, timed = _given_steps(asked), None  # checked before a program runs for minutes
    if asked.script is not None:
        with OtherProcesses() as others:
            timed = time_script(asked.script, asked.arguments, asked.steps, asked.timeout_s)
        notes.print(f"timed {len(timed.times_s)} steps of {asked.script}", soft_wrap=True, markup=False)
        if others.note:
            notes.print(others.note, soft_wrap=True, markup=False)
    moments = asked.moments if asked.moments is not None else timed.moments if timed else 0
    if not 0 <= moments <= 2:
        raise RuleError(f"the optimizer's moments must be 0, 1 or 2, got {moments}")
    measured = timed.batches if timed and timed.batches else EPOCH
    return Workload(
        steps=given or _timed_steps(asked, timed, notes),
        layout=_layout(asked, timed),
        moments=moments,
        epoch=asked.epoch if asked.epoch is not None else float(measured),
        pack_s=asked.pack_s,
        codec_s=asked.codec_s,
    )


def _given_steps(asked: PlanInputs) -> StepTimes | None:
    """The distribution of a minibatch's time, if given."""
    if asked.times is not None:
        if asked.step_s is not None or asked.spread is not None:
            raise RuleError("--step-times has the mean and the spread: leave out --step-time and --spread")
        return times_from_text(asked.times.read_text(encoding="utf-8"))
    return None if asked.step_s is None else LogNormal(asked.step_s, asked.spread or 0.0)


def _timed_steps(asked: PlanInputs, timed: Timed | None, notes: Console) -> StepTimes:
    """The measured distribution of a minibatch's time."""
    if timed is None:
        raise RuleError("give a training program, or --step-time SECONDS with --parameters or --bytes")
    found = step_times(0.0, 0.0, timed.times_s)
    notes.print(f"a step takes {seconds_text(found.mean_s)}, spread {100 * found.variation:.1f} %", markup=False)
    return LogNormal(found.mean_s, found.variation if asked.spread is None else asked.spread)


def _layout(asked: PlanInputs, timed: Timed | None) -> Layout:
    """The parameters; a square matrix and a rest if only their number is known."""
    if asked.parameters is not None:
        side = math.isqrt(asked.parameters)
        return Layout.of([(side, side), (asked.parameters - side * side,)])
    if timed is None:
        raise RuleError("give the model's size as --parameters 25M or --bytes 100M, or a training program")
    return Layout.of(timed.shapes)
