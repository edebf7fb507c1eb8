# SPDX-License-Identifier: Apache-2.0
"""The speed-up over one worker that the planner computes for a cell of the speech table.

It takes one worker's measured time of a minibatch for the mean of all workers', each of which has a processor of its
own; times that vary by VARIATION of their mean, independently; the model's parameters as 32-bit numbers; and a network
of :data:`paceline_plugins.forecast.planner.PRESETS` with one worker a host. The time that a worker itself takes for an
exchange is left out. The model is that of the table, small for what it computes.
"""

from __future__ import annotations

from _speech_reader import Listener
from _speech_training import METHODS, Size

from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.planner import PRESETS, LogNormal, Workload, forecast

NETWORKS = ("1gbe", "10gbe")
VARIATION = 0.1
MOMENTS = {"adam": 2, "momentum": 1, "sgd": 0}


def speed_ups(method: str, workers: int, size: Size, minibatch_ms: float) -> dict[str, float]:
    """By network."""
    shapes = [tuple(parameter.shape) for parameter in Listener(size.hidden, size.layers).parameters()]
    work = Workload(LogNormal(minibatch_ms / 1e3, VARIATION), Layout.of(shapes), moments=MOMENTS[size.optimizer])
    rule = rule_from_text(size.rule(METHODS[method]))
    return {name: forecast(rule, work, PRESETS[name], workers).speed_up for name in NETWORKS}
