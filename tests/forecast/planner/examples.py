# SPDX-License-Identifier: Apache-2.0
"""Work and networks with round numbers."""

from __future__ import annotations

from typing import Any

from paceline.forecast.planner import LogNormal, Network, NetworkLink, Workload
from paceline.rules.codec import Layout

NUMEL = 1 << 20
MIB = 4 * NUMEL
"""Bytes of the model."""


def work(step_s: float = 0.1, spread: float = 0.0, **more: Any) -> Workload:
    """A model of 4 MiB whose step takes 100 ms."""
    return Workload(LogNormal(step_s, spread), Layout.of([(1024, 1024)]), **more)


def wire(model_s: float = 0.1, latency_s: float = 0.0, per_host: int = 1, faster: float = 100.0) -> Network:
    """A network over which the model's bytes take `model_s`, one worker to another, and within a host so many times
    less."""
    across = NetworkLink(latency_s, MIB / model_s)
    return Network("made", across, NetworkLink(0.0, faster * MIB / model_s), per_host)


NOTHING = Network("nothing", NetworkLink())
