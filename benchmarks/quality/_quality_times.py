# SPDX-License-Identifier: Apache-2.0
"""How long the trainings of `time_to_quality.py` would take on a network, by the planner.

    seconds = sum over stages of  minibatches / k * seconds of a step of k workers, exchanges included

The workload is given, since the small models that are trained here stand for larger ones: seconds of a minibatch on one
worker, and parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from _quality_methods import Method, Stages
from _quality_tasks import Task

from paceline.rules.codec import Layout
from paceline_plugins.forecast.planner import LogNormal, Network, NetworkLink, Workload, forecast
from paceline_plugins.forecast.planner.network import ETHERNET, GIGABIT, PRESETS

LATENCY_S = PRESETS["1gbe"].across.latency_s


@dataclass(frozen=True)
class Clock:
    """Times on one network.

    Attributes:
        step_s: of a minibatch on one worker.
        parameters: of the model.
        gbit: of each worker's link; infinity for exchanges that take no time.
    """

    step_s: float
    parameters: int
    gbit: float

    @cached_property
    def _network(self) -> Network:
        if math.isinf(self.gbit):
            return Network("at once", NetworkLink())
        return Network(f"{self.gbit:g} Gbit/s", NetworkLink(LATENCY_S, ETHERNET * GIGABIT * self.gbit))

    def seconds(self, task: Task, method: str, stages: Stages) -> float:
        """Of a training."""
        work = Workload(LogNormal(self.step_s), Layout.vector(self.parameters), moments=task.moments)
        return sum(
            int(count) // int(k) * forecast(Method.of(method).rule(task), work, self._network, int(k)).step_s
            for k, count, _ in stages
        )


def time_to(quality: float, trainings: list[tuple[float, float, float]]) -> float | None:
    """The time to this quality, between trainings of (samples, time, quality), on straight lines of log quality over
    log time; None beyond the longest."""
    points = sorted(trainings)
    if points[0][2] <= quality:
        return points[0][1]
    for (_, low, worse), (_, high, better) in pairwise(points):
        if better <= quality < worse:
            share = math.log(worse / quality) / math.log(worse / better)
            return low * (high / low) ** share
    return None
