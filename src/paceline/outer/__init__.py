# SPDX-License-Identifier: Apache-2.0
"""Floor 2, the fifth choice of a rule: how is the result applied?"""

from __future__ import annotations

from paceline.outer.ada_delay import AdaDelay
from paceline.outer.arrival import Arrival, Push
from paceline.outer.average import Average
from paceline.outer.base import Outer
from paceline.outer.block_momentum import BlockMomentum
from paceline.outer.delay_compensated import DelayCompensated
from paceline.outer.elastic import Elastic
from paceline.outer.frozen_adam import FrozenAdam
from paceline.outer.nesterov import Nesterov
from paceline.outer.share import Share
from paceline.outer.staleness_aware import StalenessAware
from paceline.outer.sum import Sum
from paceline.outer.tuned_momentum import TunedMomentum

__all__ = [
    "AdaDelay",
    "Arrival",
    "Average",
    "BlockMomentum",
    "DelayCompensated",
    "Elastic",
    "FrozenAdam",
    "Nesterov",
    "Outer",
    "Push",
    "Share",
    "StalenessAware",
    "Sum",
    "TunedMomentum",
]
