# SPDX-License-Identifier: Apache-2.0
"""The log of rejected connections: a line for each, and at most one warning in ten seconds."""

from __future__ import annotations

import ipaddress
import logging
import threading
import time

logger = logging.getLogger("paceline.doors")
EVERY_S = 10.0
"""Least seconds between two warnings; the lines between them have the level INFO."""

_lock = threading.Lock()
_quiet_until = float("-inf")
_unsaid = 0


def turned_away(peer: str, why: object, expected: bool = False) -> None:
    """Log that the connection from `peer` was closed, and why; an `expected` one needs no warning. From any thread."""
    global _quiet_until, _unsaid
    with _lock:
        now = time.monotonic()
        level, more = logging.INFO, ""
        if expected:
            pass
        elif now >= _quiet_until:
            level, more = logging.WARNING, f" (and {_unsaid} before it)" if _unsaid else ""
            _quiet_until, _unsaid = now + EVERY_S, 0
        else:
            _unsaid += 1
    logger.log(level, "a connection from %s was turned away: %s%s", peer, why, more)


def neighbourhood(address: str) -> str:
    """The IPv4 address or the IPv6 /64 network: a single attacker rarely has many of them."""
    ip = ipaddress.ip_address(address.split("%")[0])
    return str(ip) if ip.version == 4 else ip.exploded[:19]
