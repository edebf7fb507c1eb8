# SPDX-License-Identifier: Apache-2.0
"""The inputs of `paceline plan`: numbers that were given, or measured on a program's steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from paceline.errors import RuleError
from paceline.observe.reports.log import RunLog
from paceline.observe.reports.summary import seconds_text
from paceline.rules.codec import Layout
from paceline_plugins.forecast.planner.busy import OtherProcesses
from paceline_plugins.forecast.planner.observed import step_s
from paceline_plugins.forecast.planner.stopwatch import Timed, time_script
from paceline_plugins.forecast.planner.stragglers import LogNormal, StepTimes, step_times
from paceline_plugins.forecast.planner.workload import Workload

EPOCH = 1000.0
STEPS, TIMEOUT_S = 20, 300.0
"""Steps of a program that are timed, and seconds after which it is stopped."""


@dataclass(frozen=True)
class Program:
    """A training program to time.

    Attributes:
        script: its file.
        arguments: of its command line.
    """

    script: Path
    arguments: list[str]


@dataclass(frozen=True)
class PlanInputs:
    """The options about the workload; see `paceline plan --help`. None where not given.

    Attributes:
        program: to time.
        step_s: mean seconds of a minibatch.
        parameters: of the model.
    """

    program: Program | None
    step_s: float | None
    parameters: int | None

    def completed(self, run: RunLog) -> PlanInputs:
        """With the step's time and the model's size of a run, where none are given."""
        return replace(
            self,
            step_s=step_s(run) if self.step_s is None else self.step_s,
            parameters=run.parameters if self.parameters is None else self.parameters,
        )


def workload(asked: PlanInputs, notes: Console) -> Workload:
    """The workload; given numbers take precedence over measured ones."""
    given = None if asked.step_s is None else LogNormal(asked.step_s, 0.0)  # checked before a program runs for minutes
    timed = None if asked.program is None else _timed(asked.program, notes)
    measured = timed.batches if timed and timed.batches else EPOCH
    return Workload(
        steps=given or _timed_steps(timed, notes),
        layout=_layout(asked, timed),
        moments=timed.moments if timed else 0,
        epoch=float(measured),
    )


def _timed(program: Program, notes: Console) -> Timed:
    """Time the steps of a program."""
    with OtherProcesses() as others:
        timed = time_script(program.script, program.arguments, STEPS, TIMEOUT_S)
    notes.print(f"timed {len(timed.times_s)} steps of {program.script}", soft_wrap=True, markup=False)
    if others.note:
        notes.print(others.note, soft_wrap=True, markup=False)
    return timed


def _timed_steps(timed: Timed | None, notes: Console) -> StepTimes:
    """The measured distribution of a minibatch's time."""
    if timed is None:
        raise RuleError("give a training program, or --step-time SECONDS with --parameters")
    found = step_times(0.0, 0.0, timed.times_s)
    notes.print(f"a step takes {seconds_text(found.mean_s)}, spread {100 * found.variation:.1f} %", markup=False)
    return LogNormal(found.mean_s, found.variation)


def _layout(asked: PlanInputs, timed: Timed | None) -> Layout:
    """The parameters; a square matrix and a rest if only their number is known."""
    if asked.parameters is not None:
        side = math.isqrt(asked.parameters)
        return Layout.of([(side, side), (asked.parameters - side * side,)])
    if timed is None:
        raise RuleError("give the model's size as --parameters 25M, or a training program")
    return Layout.of(timed.shapes)
