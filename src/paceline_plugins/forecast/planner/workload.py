# SPDX-License-Identifier: Apache-2.0
"""The workload: step times, sizes of the model, an epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import RuleError
from paceline.rules.codec import Layout
from paceline_plugins.forecast.planner.stragglers import LogNormal

BACKWARD = 2 / 3
"""Share of a step: backward computes two products, for inputs and weights, and forward one."""


@dataclass(frozen=True)
class Workload:
    """One worker's work."""

    steps: LogNormal  # the time of a minibatch on one worker
    layout: Layout  # trainable parameters
    buffers: int = 0  # 32-bit numbers of averaged buffers
    moments: int = 0  # moments of the local optimizer: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD
    backward: float = BACKWARD  # share of a step during which gradients can be sent
    epoch: float = 1000.0  # minibatches of one worker's size in a pass over the data
    pack_s: float = 0.0  # a worker's processor time for one exchange of the whole model: copies, outer step, checksum
    codec_s: float = 0.0  # its time to encode and decode the whole model once, under lossy codecs

    def __post_init__(self) -> None:
        if not self.layout.numel:
            raise RuleError("the model has no parameters; give --parameters or --bytes above 0")
        if not 0 <= self.backward <= 1:
            raise RuleError(f"backward must be a share of the step, 0..1, got {self.backward!r}")
        if not 0 < self.epoch < math.inf:
            raise RuleError(f"an epoch must have more than 0 minibatches, got {self.epoch!r}")
        for name, value in (("pack_s", self.pack_s), ("codec_s", self.codec_s)):
            if not 0 <= value < math.inf:
                raise RuleError(f"{name} must be a number of seconds, at least 0, got {value!r}")

    @cached_property
    def step_s(self) -> float:
        """Mean time of a minibatch, c."""
        return self.steps.mean_s


def dense(workload: Workload, rides: bool) -> int:
    """32-bit numbers that are sent with the parameters; `rides`: whether the optimizer's moments are."""
    return workload.buffers + (workload.moments * workload.layout.numel if rides else 0)
