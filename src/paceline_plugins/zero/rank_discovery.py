# SPDX-License-Identifier: Apache-2.0
"""This worker's rank before attaching, from the variables of its launcher or scheduler."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from paceline.communication import schedulers
from paceline.communication.torch import rendezvous
from paceline_plugins.zero.journal import process_began

BEGAN = "PACELINE_BEGAN"
"""The variable by which `paceline run` gives all workers of a host the time at which the job began."""
TIMEOUT = "PACELINE_TIMEOUT_S"
KEY = "paceline/start"


@dataclass(frozen=True)
class ZeroWorker:
    """A worker as its launcher numbers it."""

    rank: int  # 0 <= rank < size
    size: int  # workers
    local_rank: int  # within the host
    log: Path | None  # the run's log directory, or None
    random_data: bool  # whether the program draws its samples at random, so that each worker draws different ones


def from_environment(environment: Mapping[str, str]) -> ZeroWorker:
    """The rank that a launcher or a scheduler gives; else that of a single worker."""
    worker, log = schedulers.worker(environment), environment.get("PACELINE_LOG")
    rank, size, local_rank = (0, 1, 0) if worker is None else (worker.rank, worker.size, worker.local_rank)
    random_data = environment.get("PACELINE_RANDOM_DATA") == "1"
    return ZeroWorker(rank, size, local_rank, Path(log) if log else None, random_data)


def start(worker: ZeroWorker, environment: Mapping[str, str]) -> tuple[float, Path]:
    """When the job began, seconds since the epoch, and rank 0's log directory: the same on all workers.

    They come from `paceline run` on one host, else from rank 0 over the launcher's store. Workers without either take
    their own.
    """
    if (given := environment.get(BEGAN)) and worker.log is not None:
        return float(given), worker.log
    one, timeout = schedulers.worker(environment), timedelta(seconds=float(environment.get(TIMEOUT, "600")))
    store = None
    if one is not None and rendezvous.shares_store():
        store = rendezvous.fresh_store(one, timeout)
    elif one is not None and one.master is not None and not one.env:
        store = rendezvous.store(one, timeout.total_seconds())
    if store is None or worker.rank == 0:
        own = process_began(), str(worker.log or tempfile.mkdtemp(prefix="paceline-"))
        if store is None:
            return own[0], Path(own[1])
        store.set(KEY, json.dumps(own))
    began, log = json.loads(store.get(KEY))
    return float(began), Path(log)
