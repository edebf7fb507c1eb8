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
from paceline_plugins.forecast.planner.stragglers import LogNormal, StepTimes, step_times, times_from_text
from paceline_plugins.forecast.planner.workload import Workload

EPOCH = 1000.0


@dataclass(frozen=True)
class Program:
    """A training program to time.

    Attributes:
        script: its file.
        arguments: of its command line.
        steps: to time.
        timeout_s: seconds after which it is stopped.
    """

    script: Path
    arguments: list[str]
    steps: int
    timeout_s: float


@dataclass(frozen=True)
class GivenStep:
    """The options about a minibatch's time. None where not given.

    Attributes:
        mean_s: its mean, seconds.
        spread: its standard deviation over the mean.
        times: a file of measured times, which has both.
    """

    mean_s: float | None = None
    spread: float | None = None
    times: Path | None = None


@dataclass(frozen=True)
class PlanInputs:
    """The options about the workload; see `paceline plan --help`. None where not given.

    Attributes:
        program: to time.
        step: a minibatch's time.
        parameters: of the model.
        moments: of the optimizer.
        epoch: minibatches of an epoch.
        codec_s: seconds that a codec takes for the whole model.
        pack_s: seconds of copies and outer step for the whole model.
    """

    program: Program | None
    step: GivenStep
    parameters: int | None
    moments: int | None
    epoch: float | None
    codec_s: float
    pack_s: float

    def completed(self, run: RunLog) -> PlanInputs:
        """With the step's time and the model's size of a run, where none are given."""
        timed = self.step.mean_s is not None or self.step.times is not None
        return replace(
            self,
            step=self.step if timed else replace(self.step, mean_s=step_s(run)),
            parameters=run.parameters if self.parameters is None else self.parameters,
        )


def workload(asked: PlanInputs, notes: Console) -> Workload:
    """The workload; given numbers take precedence over measured ones."""
    given = _given_steps(asked.step)  # checked before a program runs for minutes
    timed = None if asked.program is None else _timed(asked.program, notes)
    moments = asked.moments if asked.moments is not None else timed.moments if timed else 0
    if not 0 <= moments <= 2:
        raise RuleError(f"the optimizer's moments must be 0, 1 or 2, got {moments}")
    measured = timed.batches if timed and timed.batches else EPOCH
    return Workload(
        steps=given or _timed_steps(asked.step, timed, notes),
        layout=_layout(asked, timed),
        moments=moments,
        epoch=asked.epoch if asked.epoch is not None else float(measured),
        pack_s=asked.pack_s,
        codec_s=asked.codec_s,
    )


def _timed(program: Program, notes: Console) -> Timed:
    """Time the steps of a program."""
    with OtherProcesses() as others:
        timed = time_script(program.script, program.arguments, program.steps, program.timeout_s)
    notes.print(f"timed {len(timed.times_s)} steps of {program.script}", soft_wrap=True, markup=False)
    if others.note:
        notes.print(others.note, soft_wrap=True, markup=False)
    return timed


def _given_steps(step: GivenStep) -> StepTimes | None:
    """The distribution of a minibatch's time, if given."""
    if step.times is not None:
        if step.mean_s is not None or step.spread is not None:
            raise RuleError("--step-times has the mean and the spread: leave out --step-time and --spread")
        return times_from_text(step.times.read_text(encoding="utf-8"))
    return None if step.mean_s is None else LogNormal(step.mean_s, step.spread or 0.0)


def _timed_steps(step: GivenStep, timed: Timed | None, notes: Console) -> StepTimes:
    """The measured distribution of a minibatch's time."""
    if timed is None:
        raise RuleError("give a training program, or --step-time SECONDS with --parameters or --bytes")
    found = step_times(0.0, 0.0, timed.times_s)
    notes.print(f"a step takes {seconds_text(found.mean_s)}, spread {100 * found.variation:.1f} %", markup=False)
    return LogNormal(found.mean_s, found.variation if step.spread is None else step.spread)


def _layout(asked: PlanInputs, timed: Timed | None) -> Layout:
    """The parameters; a square matrix and a rest if only their number is known."""
    if asked.parameters is not None:
        side = math.isqrt(asked.parameters)
        return Layout.of([(side, side), (asked.parameters - side * side,)])
    if timed is None:
        raise RuleError("give the model's size as --parameters 25M or --bytes 100M, or a training program")
    return Layout.of(timed.shapes)
