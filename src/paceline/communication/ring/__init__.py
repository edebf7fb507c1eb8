# SPDX-License-Identifier: Apache-2.0
"""Collectives over TCP sockets of our own: with TLS, between sites, and among members that change.

One connection joins each pair of workers (:mod:`~paceline.communication.ring.link`). All connections of a worker
(:mod:`~paceline.communication.ring.connections`) fail together. A plan (:mod:`~paceline.communication.ring.plans`) says
which pieces an operation (:mod:`~paceline.communication.ring.connections`) sends and takes. Each process accepts
connections at one listener (:mod:`~paceline.communication.ring.listener`).
"""

from __future__ import annotations

from paceline.communication.ring.listener import RingListener
from paceline.communication.ring.transport import RingTransport

__all__ = ["RingListener", "RingTransport"]
