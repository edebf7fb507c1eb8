# SPDX-License-Identifier: Apache-2.0
"""Ports for processes that listen a few seconds after they were told where."""

from __future__ import annotations

import contextlib
import os
import random
import re
import socket
from pathlib import Path

LOWEST = 10_000
MOST = 64
"""Test processes that run beside each other, at most."""


def lowest_given_out() -> int:
    """The first of the ports that the kernel gives to whoever asks for any."""
    path = Path("/proc/sys/net/ipv4/ip_local_port_range")
    return int(path.read_text().split()[0]) if path.exists() else 32_768


def free_port() -> int:
    """A port that no process listens on now, nor is given before it is used.

    The kernel gives out any port of its range, also one that was free a moment ago and is not yet taken by the process
    that was told of it. So this one lies below that range, and test processes beside each other take different ones.
    """
    mine = int(re.sub(r"\D", "", os.environ.get("PYTEST_XDIST_WORKER", "0"))) % MOST
    below = range(LOWEST + mine, lowest_given_out(), MOST)
    for port in [*random.SystemRandom().sample(below, len(below)), 0]:  # 0: where there is none below, any
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    raise AssertionError("no port is free")
