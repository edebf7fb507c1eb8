# SPDX-License-Identifier: Apache-2.0
"""The fifth choice of a rule: how is the result applied?"""

from __future__ import annotations

from paceline.rules.outer.ada_delay import AdaDelay
from paceline.rules.outer.arrival import Arrival, Push
from paceline.rules.outer.average import Average
from paceline.rules.outer.base import Outer
from paceline.rules.outer.block_momentum import BlockMomentum
from paceline.rules.outer.delay_compensated import DelayCompensated
from paceline.rules.outer.elastic import Elastic
from paceline.rules.outer.frozen_adam import FrozenAdam
from paceline.rules.outer.moving_average import MovingAverage
from paceline.rules.outer.nesterov import Nesterov
from paceline.rules.outer.pushes import Rescaled, Share, StalenessAware, Sum
from paceline.rules.outer.tuned_momentum import TunedMomentum

__all__ = [
    "AdaDelay",
    "Arrival",
    "Average",
    "BlockMomentum",
    "DelayCompensated",
    "Elastic",
    "FrozenAdam",
    "MovingAverage",
    "Nesterov",
    "Outer",
    "Push",
    "Rescaled",
    "Share",
    "StalenessAware",
    "Sum",
    "TunedMomentum",
]
