# SPDX-License-Identifier: Apache-2.0
"""The transport for this program's environment."""

from __future__ import annotations

import os
from typing import Any

from paceline.communication import virtual
from paceline.communication.base import SoloTransport, Transport
from paceline.communication.sockets.tls import TLS
from paceline.communication.torch.transport import ProcessTransport, launched
from paceline.extensions import TRANSPORTS, extension

VARIABLE = "PACELINE_TRANSPORT"
"""Has the kind that `paceline run --transport` names."""


def connect(timeout_s: float, group: Any = None, kind: str = "auto", tls: TLS | None = None) -> Transport:
    """Connect: to the virtual cluster, to the workers of the launcher or the group, or as a cluster of one.

    Args:
        timeout_s: deadline of every operation, seconds.
        group: the user's process group, a transport that is connected already, or None.
        kind: "auto" for what `paceline run --transport` names, else torch.distributed; "channel" for a ring over our
            own sockets; "mpi" for MPI.
        tls: certificates for a ring; None for unencrypted connections.
    """
    here = virtual.current()
    if here is not None:
        return here.clone()
    if isinstance(group, Transport):
        return group
    if kind == "auto":
        kind = os.environ.get(VARIABLE, kind)
    if kind == "mpi":
        met: Transport = extension(TRANSPORTS, "mpi")(timeout_s, group)
        return met
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
