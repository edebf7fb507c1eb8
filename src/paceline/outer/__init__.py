# SPDX-License-Identifier: Apache-2.0
"""Floor 2, the fifth choice of a rule: how is the result applied?"""

from __future__ import annotations

from paceline.outer.average import Average
from paceline.outer.base import Outer
from paceline.outer.block_momentum import BlockMomentum
from paceline.outer.frozen_adam import FrozenAdam
from paceline.outer.nesterov import Nesterov

__all__ = ["Average", "BlockMomentum", "FrozenAdam", "Nesterov", "Outer"]
