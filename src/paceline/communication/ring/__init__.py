# SPDX-License-Identifier: Apache-2.0
"""Collectives over our own sockets, where torch's may not go: with TLS, between sites, with members that change.

One connection joins each pair of workers (:mod:`~paceline.communication.ring.link`), and all of a worker's connections,
its mesh (:mod:`~paceline.communication.ring.connections`), fail together. A plan
(:mod:`~paceline.communication.ring.plans`) says which pieces an operation sends and takes, an operation
(:mod:`~paceline.communication.ring.operation`) follows it. Connections come in at the process's door
(:mod:`~paceline.communication.ring.listener`).
"""

from __future__ import annotations

from paceline.communication.ring.listener import RingListener
from paceline.communication.ring.transport import RingTransport

__all__ = ["RingListener", "RingTransport"]
