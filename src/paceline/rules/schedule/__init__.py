# SPDX-License-Identifier: Apache-2.0
"""The first choice of a rule: when do workers exchange?"""

from __future__ import annotations

from paceline.rules.schedule.base import Probe, Schedule
from paceline.rules.schedule.bounded import Bounded
from paceline.rules.schedule.every_block import EveryBlock
from paceline.rules.schedule.every_step import EveryStep
from paceline.rules.schedule.growth import GivenGrowth, Growth
from paceline.rules.schedule.paced import Pace, Paced

__all__ = ["Bounded", "EveryBlock", "EveryStep", "GivenGrowth", "Growth", "Pace", "Paced", "Probe", "Schedule"]
