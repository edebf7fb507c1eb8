# SPDX-License-Identifier: Apache-2.0
"""The simulator: the production code with N virtual workers in one process."""

from __future__ import annotations

from paceline.forecast.sim.clock import Clock, exponential, link, uniform
from paceline.forecast.sim.simulate import simulate
from paceline_plugins.forecast.vectorised.grown import GrownResult, Stage, simulate_grown
from paceline_plugins.forecast.vectorised.vectorised import StackedResult, simulate_stacked
from paceline_plugins.forecast.vectorised.within import WithinResult, simulate_within

__all__ = [
    "Clock",
    "GrownResult",
    "StackedResult",
    "Stage",
    "WithinResult",
    "exponential",
    "link",
    "simulate",
    "simulate_grown",
    "simulate_stacked",
    "simulate_within",
    "uniform",
]
