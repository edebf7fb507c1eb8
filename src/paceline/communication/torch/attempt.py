# SPDX-License-Identifier: Apache-2.0
"""A store for each restart attempt, so that restarted workers do not read the addresses of the ones before.

torchrun restarts all workers when one fails or a host joins, and its store, where the workers publish the addresses of
their sockets, lives on. The addresses of the dead workers are still there, under the same keys, and the connections of
the next attempt fail ("connectFullMesh failed"). The count of restarts does not identify an attempt, because it does
not change when a host joins. So rank 0 draws a new number from the store, and hands it to the live workers only: each
worker publishes a random token, gets the number under this token, and confirms it. Tokens of dead workers are answered
as well, but never confirmed.
"""

from __future__ import annotations

import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from paceline.communication.schedulers import Worker
from paceline.errors import PeerLostError

LOOK_EVERY_S = 0.02
PREFIX = "paceline/attempt"


def shares_store() -> bool:
    """Whether the workers' store is the launcher's, which outlives them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(worker: Worker, timeout: timedelta) -> Any:
    """A part of the launcher's store for this attempt alone; PeerLostError names the workers that do not come."""
    assert worker.master is not None
    host, port = worker.master
    store = dist.TCPStore(host, port, None, False, timeout)  # type: ignore[attr-defined]
    number = agree(store, worker.rank, worker.size, timeout.total_seconds())
    return dist.PrefixStore(f"{PREFIX}/{number}", store)  # type: ignore[attr-defined]


def agree(store: Any, rank: int, size: int, timeout_s: float) -> int:
    """The number of this attempt: the same on all `size` workers, and new in the store."""
    token = secrets.token_hex(8)
    store.set(f"{PREFIX}/{size}/says/{rank}", token)
    return _lead(store, size, timeout_s) if rank == 0 else _follow(store, rank, token, timeout_s)


def _lead(store: Any, size: int, timeout_s: float) -> int:
    number = int(store.add(f"{PREFIX}/number", 1))
    missing, answered = set(range(1, size)), set()
    deadline = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            token = _read(store, f"{PREFIX}/{size}/says/{rank}")
            if token and token not in answered:
                store.set(f"{PREFIX}/answer/{token}", str(number))
                answered.add(token)
            if token and _read(store, f"{PREFIX}/{number}/confirms/{rank}") == token:
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            who = ", ".join(str(rank) for rank in sorted(missing))
            raise PeerLostError(
                f"of {size} workers, {who} did not come within {timeout_s:g} s: look at their last lines"
            )
        if missing:
            time.sleep(LOOK_EVERY_S)
    return number


def _follow(store: Any, rank: int, token: str, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while not (content := _read(store, f"{PREFIX}/answer/{token}")):
        if time.monotonic() > deadline:
            raise PeerLostError(f"worker 0 did not answer within {timeout_s:g} s: look at its last lines")
        time.sleep(LOOK_EVERY_S)
    store.set(f"{PREFIX}/{content}/confirms/{rank}", token)
    return int(content)


def _read(store: Any, key: str) -> str:
    """The value of a key, "" if it is not set; never waits."""
    return store.get(key).decode() if store.check([key]) else ""
