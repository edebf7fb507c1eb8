# SPDX-License-Identifier: Apache-2.0
"""Work and networks with round numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.observe.reports.events import ExchangeEvent, Value
from paceline.observe.reports.log import RunLog, WorkerLog
from paceline.rules.codec import Layout
from paceline_plugins.forecast.planner import LogNormal, Network, NetworkLink, Workload

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


def run_log(effective: list[float | None], losses: list[float], workers: int = 4, period: int = 8) -> RunLog:
    """The log of a run that tells these effective workers and this loss after each of its blocks."""
    exchanges = [
        ExchangeEvent(block, block, 1, period, block * period, compute_s=0.1 * period, effective_workers=found)
        for block, found in enumerate(effective, 1)
    ]
    values = [Value(n, "loss", loss, n * period) for n, loss in enumerate(losses, 1)]
    attach = {"size": workers, "rule": f"averaging(period={period})", "parameters": NUMEL}
    logs = [WorkerLog(Path(), rank, attach, exchanges=list(exchanges), values=values) for rank in range(workers)]
    return RunLog(Path("here"), 1, logs, "here")
