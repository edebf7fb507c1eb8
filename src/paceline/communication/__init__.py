# SPDX-License-Identifier: Apache-2.0
"""Service 1, communication: one narrow interface (:mod:`.base`), and the transports that implement it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline.communication.base import CompletedOperation, Pending, SoloTransport, Transport
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "CompletedOperation": "base",
            "SoloTransport": "base",
            "Pending": "base",
            "Transport": "base",
        },
    )

__all__ = ["CompletedOperation", "Pending", "SoloTransport", "Transport", "connect", "kinds"]

VARIABLE = "PACELINE_TRANSPORT"
"""Has the kind that `paceline run --transport` names."""


def kinds() -> list[str]:
    """The transports that one can name: ours, and the entry points of plugins."""
    from importlib.metadata import entry_points

    from paceline.extensions import TRANSPORTS

    return ["auto", "channel", *sorted({one.name for one in entry_points(group=TRANSPORTS)})]


def connect(timeout_s: float, group: Any = None, kind: str = "auto", tls: Any = None) -> Transport:
    """Connect: to the virtual cluster, to the workers of the launcher or the group, or as a cluster of one.

    Args:
        timeout_s: deadline of every operation, seconds.
        group: the user's process group, a transport that is connected already, or None.
        kind: "auto" for what `paceline run --transport` names, else torch.distributed; "channel" for a ring over our
            own sockets; else the name of an entry point of `TRANSPORTS`, such as "mpi".
        tls: certificates for a ring; None for unencrypted connections.
    """
    from paceline.communication import base, virtual
    from paceline.communication.torch.transport import ProcessTransport, launched
    from paceline.extensions import TRANSPORTS, extension

    here = virtual.current()
    if here is not None:
        return here.clone()
    if isinstance(group, base.Transport):
        return group
    if kind == "auto":
        kind = os.environ.get(VARIABLE, kind)
    if kind not in ("auto", "channel"):
        met: Transport = extension(TRANSPORTS, kind)(timeout_s, group)
        return met
    if group is None and not launched():
        return base.SoloTransport()
    if kind == "channel":
        from paceline.communication.ring.meeting import meet  # loads the sockets

        return meet(timeout_s, group, tls)
    transport = ProcessTransport(timeout_s, group)
    if transport.world.size > 1:
        return transport
    transport.close()
    return base.SoloTransport(transport.world)
