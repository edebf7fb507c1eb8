# SPDX-License-Identifier: Apache-2.0
"""Forecasts before you rent: the planner, the doctor, and vectorised simulation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline_plugins.forecast.vectorised.grown import GrownResult, Stage, simulate_grown
    from paceline_plugins.forecast.vectorised.vectorised import StackedResult, simulate_stacked
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "GrownResult": "vectorised.grown",
            "StackedResult": "vectorised.vectorised",
            "Stage": "vectorised.grown",
            "simulate_grown": "vectorised.grown",
            "simulate_stacked": "vectorised.vectorised",
        },
    )

__all__ = [
    "GrownResult",
    "StackedResult",
    "Stage",
    "simulate_grown",
    "simulate_stacked",
]
