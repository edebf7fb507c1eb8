# SPDX-License-Identifier: Apache-2.0
"""Floor 1, communication: one narrow seam, and what is behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.transport.base import Alone, Done, Pending, Transport
    from paceline.transport.connecting import connect
else:
    __getattr__, __dir__ = lazily(
        __name__, {"Alone": "base", "Done": "base", "Pending": "base", "Transport": "base", "connect": "connecting"}
    )

__all__ = ["Alone", "Done", "Pending", "Transport", "connect"]
