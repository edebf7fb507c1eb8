# SPDX-License-Identifier: Apache-2.0
"""Which transport there is where this program runs."""

from __future__ import annotations

from typing import Any

from paceline.communication import virtual
from paceline.communication.base import SoloTransport, Transport
from paceline.communication.sockets.tls import TLS
from paceline.communication.torch.transport import ProcessTransport, launched


def connect(timeout_s: float, group: Any = None, kind: str = "auto", tls: TLS | None = None) -> Transport:
    """The transport of the place where this program runs.

    A virtual worker finds its virtual cluster; a process that torchrun or the user made part of a group finds the
    others; everybody else is a cluster of one.

    Args:
        timeout_s: deadline of every operation, seconds.
        group: a group of the user's, or None.
        kind: how processes speak to each other: "auto" is torch.distributed, "channel" a ring over our own sockets.
        tls: certificates for the latter, or None for connections in the clear.
    """
    here = virtual.current()
    if here is not None:
        return here.clone()
    if kind == "channel" and (group is not None or launched()):
        from paceline.communication.ring.meeting import meet

        return meet(timeout_s, group, tls)
    if group is not None or launched():
        transport = ProcessTransport(timeout_s, group)
        if transport.world.size > 1:
            return transport
        transport.close()
        return SoloTransport(transport.world)
    return SoloTransport()
