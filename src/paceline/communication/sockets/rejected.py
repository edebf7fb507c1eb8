# SPDX-License-Identifier: Apache-2.0
"""What is said of connections that are turned away: a line each, of which people see one in ten seconds."""

from __future__ import annotations

import ipaddress
import logging
import threading
import time

logger = logging.getLogger("paceline.doors")
EVERY_S = 10.0
"""Seconds between two lines that are warnings; those between them are of the level INFO."""

_lock = threading.Lock()
_quiet_until = float("-inf")
_unsaid = 0


def turned_away(peer: str, why: object, expected: bool = False) -> None:
    """Write down that the connection from `peer` was closed, and why; from any thread.

    Args:
        expected: whether workers of the job come so now and then, so that people need not be told.
    """
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
    """What a stranger cannot easily have many of: an address of IPv4, a network of 64 bits of IPv6."""
    ip = ipaddress.ip_address(address.split("%")[0])
    return str(ip) if ip.version == 4 else ip.exploded[:19]
