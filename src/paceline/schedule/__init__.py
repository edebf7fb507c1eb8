# SPDX-License-Identifier: Apache-2.0
"""Floor 2, the first choice of a rule: when do workers exchange?"""

from __future__ import annotations

from paceline.schedule.bounded import Bounded
from paceline.schedule.every_block import EveryBlock
from paceline.schedule.every_step import EveryStep
from paceline.schedule.paced import Paced

Schedule = EveryStep | EveryBlock | Bounded
"""`Paced` is an `EveryBlock`."""

__all__ = ["Bounded", "EveryBlock", "EveryStep", "Paced", "Schedule"]
