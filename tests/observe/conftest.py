# SPDX-License-Identifier: Apache-2.0
"""Synthetic logs: what a run of N workers would have written, small and exactly known."""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from paceline.observe.http_server import BoundedServer

Event = dict[str, Any]

BLOCKS, PERIOD, BATCH = 40, 4, 32
COMPUTE_S, WAIT_S, EXCHANGE_S, BYTES = 0.8, 0.15, 0.05, 1000


def worker_events(rank: int, size: int, rule: str, host: str, samples: bool) -> list[Event]:
    """A worker's events: each block takes one second and ends with an exchange and two values."""
    noise = random.Random(rank)
    events: list[Event] = [
        {
            "kind": "attach", "at_s": 0.0, "rank": rank, "size": size, "host": host, "rule": rule,
            "transport": "gloo", "parameters": 250, "buffers": 0, "version": "0.1.0",
            "unix_s": 1.7e9, "cores": 64,
        },
        {"kind": "epoch", "at_s": 0.0, "rank": rank, "epoch": 1, "batches": BLOCKS * PERIOD},
    ]  # fmt: skip
    for block in range(1, BLOCKS + 1):
        done = block * PERIOD
        count = {"total_minibatches": done, "total_samples": done * BATCH if samples else None}
        loss = 1.5 + 2.0 * math.exp(-block / 6) + noise.gauss(0, 0.05)
        stamp = {"at_s": float(block), "rank": rank}
        events.append({"kind": "value", **stamp, "name": "loss", "value": loss, **count})
        if block % 10 == 0:
            validation = 1.6 + 2.0 * math.exp(-block / 6)
            events.append({"kind": "value", **stamp, "name": "validation loss", "value": validation, **count})
        events.append(
            {
                "kind": "exchange", **stamp, "block": block, "exchanges": 1, "minibatches": PERIOD,
                "samples": PERIOD * BATCH if samples else None, **count, "compute_s": COMPUTE_S,
                "wait_s": WAIT_S, "exchange_s": EXCHANGE_S, "bytes": BYTES, "left_out": [],
                "warmup": False,
            }
        )  # fmt: skip
    total = {"minibatches": BLOCKS * PERIOD, "bytes": BLOCKS * BYTES}
    events.append({"kind": "close", "at_s": BLOCKS + 0.5, "rank": rank, **total})
    return events


DATA_S = 0.2


def waiting(rank: int, events: list[Event]) -> list[Event]:
    """A block has DATA_S of waiting for data in it; worker 1 waits twice as long in block 1 to 20."""
    for event in events:
        if event["kind"] == "exchange":
            event["data_s"] = DATA_S * (2 if rank == 1 and event["block"] <= 20 else 1)
            event["compute_s"] = COMPUTE_S - event["data_s"]
    return events


def pushing(rank: int, events: list[Event]) -> list[Event]:
    """An asynchronous run of four: a block of a worker of rank r brings pushes of delay r and one of 2 r.

    Worker 2 falls silent after block 18; worker 3 takes over. Two pushes of worker 1 are refused.
    """
    for event in events:
        if event["kind"] == "exchange":
            event["delays"] = {"0": 4} if rank == 0 else {str(rank): 3, str(2 * rank): 1}
            event["refused"] = 2 if (rank, event["block"]) == (1, 7) else 0
    if rank == 2:
        return [event for event in events if event["at_s"] <= 18]
    lost = {"rank_lost": 2, "why": "its connection was reset", "taken_over": [3]}
    events.insert(-1, {"kind": "lost", "at_s": 18.5 + rank / 10, "rank": rank, **lost})
    if rank == 3:
        takeover = {"slice_of": 2, "version": 812, "from": "replica"}
        events.insert(-1, {"kind": "takeover", "at_s": 19.0, "rank": 3, **takeover})
    return events


def lines(events: list[Event]) -> str:
    """Events as the text of a log file."""
    return "".join(json.dumps(event) + "\n" for event in events)


@contextmanager
def served(page: Any) -> Iterator[int]:
    """The port at which a live page answers."""
    server = BoundedServer(("127.0.0.1", 0), page.answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Writes the logs of a run into a new directory and returns it."""

    def write(
        name: str = "run",
        size: int = 2,
        rule: str = "bmuf(period=4)",
        *,
        samples: bool = True,
        number: int = 1,
        change: Callable[[int, list[Event]], list[Event]] = lambda rank, events: events,
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        ending = "jsonl" if number == 1 else f"{number}.jsonl"
        for rank in range(size):
            events = change(rank, worker_events(rank, size, rule, f"host-{rank // 2}", samples))
            (directory / f"rank-{rank:03d}.{ending}").write_text(lines(events), encoding="utf-8")
        return directory

    return write
