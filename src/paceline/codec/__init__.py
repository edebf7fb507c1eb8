# SPDX-License-Identifier: Apache-2.0
"""Floor 2, the third choice of a rule: how is it written on the wire?"""

from __future__ import annotations

from paceline.codec.base import Codec, State, Steps, Wire
from paceline.codec.dense import Dense
from paceline.codec.layout import Layout, Matrix

__all__ = ["Codec", "Dense", "Layout", "Matrix", "State", "Steps", "Wire"]
