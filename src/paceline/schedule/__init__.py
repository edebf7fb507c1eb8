# SPDX-License-Identifier: Apache-2.0
"""Floor 2, the first choice of a rule: when do workers exchange?"""

from __future__ import annotations

from paceline.schedule.bounded import Bounded
from paceline.schedule.every_block import EveryBlock
from paceline.schedule.every_step import EveryStep

Schedule = EveryStep | EveryBlock | Bounded

__all__ = ["Bounded", "EveryBlock", "EveryStep", "Schedule"]
