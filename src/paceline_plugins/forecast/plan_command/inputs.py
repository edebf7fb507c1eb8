# SPDX-License-Identifier: Apache-2.0
"""The inputs of `paceline plan`: numbers that were given, or measured on a program's steps."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from paceline.errors import RuleError
from paceline.observe.reports.summary import seconds_text
from paceline.rules.codec import Layout
from paceline_plugins.forecast.planner.stopwatch import Timed, time_script
from paceline_plugins.forecast.planner.stragglers import LogNormal
from paceline_plugins.forecast.planner.workload import Workload

EPOCH = 1000.0
STEPS, TIMEOUT_S = 20, 300.0
"""Steps of a program that are timed, and seconds after which it is stopped."""
MUCH_LOAD = 1.5
"""Runnable processes a core; the program alone makes one at most."""


def workload(
    script: Path | None, arguments: Sequence[str], step_s: float | None, parameters: int | None, notes: Console
) -> Workload:
    """The workload; given numbers take precedence over those that are measured on the script, None where not given."""
    given = None if step_s is None else LogNormal(step_s)  # checked before a program runs for minutes
    timed = None if script is None else _timed(script, arguments, notes)
    return Workload(
        steps=given or _steps(timed, notes),
        layout=_layout(parameters, timed),
        moments=timed.moments if timed else 0,
        epoch=float(timed.batches) if timed and timed.batches else EPOCH,
    )


def _timed(script: Path, arguments: Sequence[str], notes: Console) -> Timed:
    """Time the steps of a program."""
    timed = time_script(script, list(arguments), STEPS, TIMEOUT_S)
    notes.print(f"timed {len(timed.times_s)} steps of {script}", soft_wrap=True, markup=False)
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > MUCH_LOAD * cores:
        notes.print(
            f"this machine is busy (load {load:.1f} on {cores} cores), so steps may be faster alone; time them again",
            soft_wrap=True,
            markup=False,
        )
    return timed


def _steps(timed: Timed | None, notes: Console) -> LogNormal:
    """The measured distribution of a minibatch's time."""
    if timed is None:
        raise RuleError("give a training program, or --step-time SECONDS with --parameters")
    mean_s = statistics.fmean(timed.times_s)
    found = LogNormal(mean_s, statistics.stdev(timed.times_s) / mean_s)
    notes.print(f"a step takes {seconds_text(mean_s)}, spread {100 * found.variation:.1f} %", markup=False)
    return found


def _layout(parameters: int | None, timed: Timed | None) -> Layout:
    """The parameters; a square matrix and a rest if only their number is known."""
    if parameters is not None:
        side = math.isqrt(parameters)
        return Layout.of([(side, side), (parameters - side * side,)])
    if timed is None:
        raise RuleError("give the model's size as --parameters 25M, or a training program")
    return Layout.of(timed.shapes)
