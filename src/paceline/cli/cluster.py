# SPDX-License-Identifier: Apache-2.0
"""The shape of a run, as the command line gives it. Apart, because what starts it loads torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cluster:
    """How many hosts, which of them this is, and how many workers on each.

    Attributes:
        workers: on each host.
        hosts: in all.
        host_index: of this host; ranks follow it.
        master: host name and port where several hosts meet; None on one host.
        timeout_s: after so many seconds somebody who does not answer is lost.
    """

    workers: int
    hosts: int = 1
    host_index: int = 0
    master: tuple[str, int] | None = None
    timeout_s: float = 600.0
