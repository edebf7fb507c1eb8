# SPDX-License-Identifier: Apache-2.0
"""Collectives over our own sockets, where torch's may not go: with TLS, between sites, with members that change.

One connection joins each pair of workers (:mod:`~paceline.transport.ring.link`), and all of a worker's connections, its
mesh (:mod:`~paceline.transport.ring.mesh`), fail together. A plan (:mod:`~paceline.transport.ring.plans`) says which
pieces an operation sends and takes, an operation (:mod:`~paceline.transport.ring.operation`) follows it. Connections
come in at the process's door (:mod:`~paceline.transport.ring.door`).
"""

from __future__ import annotations

from paceline.transport.ring.door import Door
from paceline.transport.ring.transport import RingTransport

__all__ = ["Door", "RingTransport"]
