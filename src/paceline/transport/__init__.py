# SPDX-License-Identifier: Apache-2.0
"""Floor 1, communication: one narrow seam, and what is behind it."""

from __future__ import annotations

from typing import Any

from paceline.transport import process, virtual
from paceline.transport.base import Alone, Done, Pending, Transport

__all__ = ["Alone", "Done", "Pending", "Transport", "connect"]


def connect(timeout_s: float, group: Any = None) -> Transport:
    """The transport of the place where this program runs.

    A virtual worker finds its virtual cluster; a process that torchrun or the user made part of a group finds the
    others; everybody else is a cluster of one.
    """
    here = virtual.current()
    if here is not None:
        return here.clone()
    if group is not None or process.launched():
        transport = process.ProcessTransport(timeout_s, group)
        if transport.world.size > 1:
            return transport
        transport.close()
        return Alone(transport.world)
    return Alone()
