# SPDX-License-Identifier: Apache-2.0
"""The simulator: the production code with N virtual workers in one process."""

from __future__ import annotations

from paceline.forecast.sim.clock import Clock, exponential, link, uniform
from paceline.forecast.sim.simulate import simulate

__all__ = [
    "Clock",
    "exponential",
    "link",
    "simulate",
    "uniform",
]
