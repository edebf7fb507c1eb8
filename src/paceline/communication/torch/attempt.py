# SPDX-License-Identifier: Apache-2.0
"""Which attempt this is: workers that a launcher started again meet each other, and not what their predecessors left.

torchrun starts all workers again when one fails or a host joins, and its store, where the workers leave the addresses
at which they listen, lives on. What the dead have written is still there, under the same names, and the connections of
the next attempt fail ("connectFullMesh failed"). The count of restarts cannot tell attempts apart, because it does not
change when a host joins. So rank 0 draws a new number from the store, and tells it to the living in a way in which the
dead cannot take part: each worker says a word of its own that nobody has said before, is answered under that word, and
confirms the answer. What a dead worker had said is answered as well, and never confirmed.
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
    """Whether the workers' store is the launcher's, which lives on when they are started again."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def fresh_store(worker: Worker, timeout: timedelta) -> Any:
    """A part of the launcher's store that belongs to this attempt alone.

    Raises:
        PeerLostError: some worker did not come within the timeout; the message names it.
    """
    assert worker.master is not None
    host, port = worker.master
    store = dist.TCPStore(host, port, None, False, timeout)  # type: ignore[attr-defined]
    number = agree(store, worker.rank, worker.size, timeout.total_seconds())
    return dist.PrefixStore(f"{PREFIX}/{number}", store)  # type: ignore[attr-defined]


def agree(store: Any, rank: int, size: int, timeout_s: float) -> int:
    """The number of this attempt, the same on all workers and on none of an earlier one.

    Args:
        store: of torch.distributed; whatever earlier attempts have left in it does no harm.
        rank: of this worker.
        size: of the attempt.
        timeout_s: for all to come.
    """
    word = secrets.token_hex(8)
    store.set(f"{PREFIX}/{size}/says/{rank}", word)
    return _lead(store, size, timeout_s) if rank == 0 else _follow(store, rank, word, timeout_s)


def _lead(store: Any, size: int, timeout_s: float) -> int:
    number = int(store.add(f"{PREFIX}/number", 1))
    missing, answered = set(range(1, size)), set()
    deadline = time.monotonic() + timeout_s
    while missing:
        for rank in sorted(missing):
            word = _read(store, f"{PREFIX}/{size}/says/{rank}")
            if word and word not in answered:
                store.set(f"{PREFIX}/answer/{word}", str(number))
                answered.add(word)
            if word and _read(store, f"{PREFIX}/{number}/confirms/{rank}") == word:
                missing.discard(rank)
        if missing and time.monotonic() > deadline:
            who = ", ".join(str(rank) for rank in sorted(missing))
            raise PeerLostError(
                f"of {size} workers, {who} did not come within {timeout_s:g} s: look at their last lines"
            )
        if missing:
            time.sleep(LOOK_EVERY_S)
    return number


def _follow(store: Any, rank: int, word: str, timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while not (said := _read(store, f"{PREFIX}/answer/{word}")):
        if time.monotonic() > deadline:
            raise PeerLostError(f"worker 0 did not answer within {timeout_s:g} s: look at its last lines")
        time.sleep(LOOK_EVERY_S)
    store.set(f"{PREFIX}/{said}/confirms/{rank}", word)
    return int(said)


def _read(store: Any, key: str) -> str:
    """What stands there, "" where nothing does; never waits."""
    return store.get(key).decode() if store.check([key]) else ""
