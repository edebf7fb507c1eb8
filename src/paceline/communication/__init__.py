# SPDX-License-Identifier: Apache-2.0
"""Service 1, communication: one narrow interface (:mod:`.base`), and the transports that implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.communication.base import CompletedOperation, Pending, SoloTransport, Transport
    from paceline.communication.connection import connect
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "CompletedOperation": "base",
            "SoloTransport": "base",
            "Pending": "base",
            "Transport": "base",
            "connect": "connection",
        },
    )

__all__ = ["CompletedOperation", "Pending", "SoloTransport", "Transport", "connect"]
