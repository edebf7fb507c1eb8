# SPDX-License-Identifier: Apache-2.0
"""The workload and its conditions: step times, sizes of the model, an epoch, failures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from paceline.errors import RuleError
from paceline.rules.codec import Layout
from paceline_plugins.forecast.planner.stragglers import StepTimes

BACKWARD = 2 / 3
"""Share of a step: backward computes two products, for inputs and weights, and forward one."""


@dataclass(frozen=True)
class Workload:
    """One worker's work.

    Attributes:
        steps: the time of a minibatch on one worker.
        layout: trainable parameters.
        buffers: 32-bit numbers of averaged buffers.
        moments: moments of the local optimizer: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD.
        backward: share of a step during which gradients can be sent.
        epoch: minibatches of one worker's size in a pass over the data.
        pack_s: a worker's processor time for one exchange of the whole model: copies, outer step, checksum.
        codec_s: its time to encode and decode the whole model once, under lossy codecs.
    """

    steps: StepTimes
    layout: Layout
    buffers: int = 0
    moments: int = 0
    backward: float = BACKWARD
    epoch: float = 1000.0
    pack_s: float = 0.0
    codec_s: float = 0.0

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


@dataclass(frozen=True)
class Conditions:
    """The cluster besides its network.

    Attributes:
        failures_per_hour: of one worker.
        recovery_s: until a lost worker is replaced.
        checkpoint_s: for which all workers wait for a checkpoint.
        elastic: whether the remaining workers go on without a lost one (`paceline run --elastic`, asynchronous rules),
            or all restart from the last checkpoint.
    """

    failures_per_hour: float = 0.0
    recovery_s: float = 120.0
    checkpoint_s: float = 10.0
    elastic: bool = False

    def __post_init__(self) -> None:
        for name in ("failures_per_hour", "recovery_s", "checkpoint_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise RuleError(f"{name} must be a number, at least 0, got {value!r}")

    def availability(self, workers: int, block_s: float, elastic: bool) -> float:
        """Share of the time in which no work is lost to failures.

            all start again:    1 / (1 + C/I + N f (R + I/2)),     I = sqrt(2 C / (N f))
            others go on:       1 / (1 + f (R + b/2))

        f failures of a worker a second, R recovery, C a checkpoint, I the interval between two, b a block. Where all
        restart, each failure costs all workers the recovery and half an interval; where the others go on, it costs one
        worker the recovery and half a block.

        Source: J. Young, CACM 17 (1974), whose interval it is; Daly, FGCS 22 (2006), has the higher orders.

        Args:
            workers: N.
            block_s: seconds of a block.
            elastic: whether the rule lets the others go on.
        """
        rate = self.failures_per_hour / 3600
        if not rate:
            return 1.0
        if elastic or self.elastic:
            return 1 / (1 + rate * (self.recovery_s + block_s / 2))
        interval_s = math.sqrt(2 * self.checkpoint_s / (workers * rate))
        saving = self.checkpoint_s / interval_s if interval_s else 0.0
        return 1 / (1 + saving + workers * rate * (self.recovery_s + interval_s / 2))
