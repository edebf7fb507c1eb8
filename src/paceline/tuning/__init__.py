# SPDX-License-Identifier: Apache-2.0
"""Service 5, tuning: changes settings on all workers at the same step; schedules that need all workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.tuning.batch_growth import BatchGrowth
    from paceline.tuning.newbob import Newbob
    from paceline.tuning.request_files import TuneRequest
    from paceline.tuning.warm_up import WarmUp
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "BatchGrowth": "batch_growth",
            "Newbob": "newbob",
            "TuneRequest": "request_files",
            "WarmUp": "warm_up",
        },
    )

__all__ = ["BatchGrowth", "Newbob", "TuneRequest", "WarmUp"]
