# SPDX-License-Identifier: Apache-2.0
"""Floor 4: settings of a run that change on all workers at the same place, and schedules that need the whole cluster."""

from __future__ import annotations

from paceline.tuning.tuner import Request

__all__ = ["Request"]
