# SPDX-License-Identifier: Apache-2.0
"""Floor 4, data distribution: every sample of an epoch on exactly one worker."""

from __future__ import annotations

from paceline.data.feed import Feed
from paceline.data.share import Share

__all__ = ["Feed", "Share"]
