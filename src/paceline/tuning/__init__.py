# SPDX-License-Identifier: Apache-2.0
"""Service 5, tuning: changes settings on all workers at the same step; a schedule that needs all workers."""

from __future__ import annotations

from paceline.tuning.request_files import TuneRequest
from paceline.tuning.schedules import Newbob

__all__ = ["Newbob", "TuneRequest"]
