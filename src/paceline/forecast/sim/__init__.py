# SPDX-License-Identifier: Apache-2.0
"""The simulator: the production code with N virtual workers in one process."""

from __future__ import annotations

from paceline.forecast.sim.clock import Clock, exponential, link, uniform
from paceline.forecast.sim.simulate import simulate
from paceline.forecast.sim.vectorised import StackedResult, simulate_stacked

__all__ = ["Clock", "StackedResult", "exponential", "link", "simulate", "simulate_stacked", "uniform"]
