# SPDX-License-Identifier: Apache-2.0
"""N workers in one process, one at a time, on a simulated clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.communication.virtual.scheduler import Closable, Cluster
    from paceline.communication.virtual.transport import VirtualTransport, current, run
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "Closable": "scheduler",
            "Cluster": "scheduler",
            "VirtualTransport": "transport",
            "current": "transport",
            "run": "transport",
        },
    )

__all__ = ["Closable", "Cluster", "VirtualTransport", "current", "run"]
