# SPDX-License-Identifier: Apache-2.0
"""N workers in one process, one at a time, on a simulated clock."""

from __future__ import annotations

from paceline.communication.virtual.transport import Closable, Cluster, VirtualTransport, current, run

__all__ = ["Closable", "Cluster", "VirtualTransport", "current", "run"]
