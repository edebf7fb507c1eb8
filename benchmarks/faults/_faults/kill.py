# SPDX-License-Identifier: Apache-2.0
"""Recovery alone: on loopback, one of four workers dies while the others wait for it in the exchange."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from _faults import count, judge
from _faults.cluster import POLL_S, Cluster, Worker
from _faults.job import Job

MINIBATCH_S = 0.02
READY_S = 60.0
CALM = 3  # exchanges between two deaths, all workers in them


def kill(directory: Path, times: int, seed: int, workers: int, hidden: int) -> dict[str, Any]:
    """SIGKILL so often; seconds from a death, and from when it was seen, to the survivors' next exchange."""
    job = Job(
        books=str(directory / "books"),
        corpus=str(directory / "corpus.safetensors"),
        minibatches=60_000,  # more than are made
        minibatch_s=MINIBATCH_S,
        seed=seed,
        hidden=hidden,
    )
    cluster = Cluster(directory, job)
    killed: list[tuple[int, float]] = []
    try:
        cluster.start(0, workers)
        for turn in range(times):
            victim = _settled(cluster, workers)[turn % workers]
            hold = Path(job.books) / f"hold-{victim.number}"
            hold.touch()
            _wait(lambda v=victim: _all_wait(cluster, v), "the others to come to the exchange", cluster)
            victim.signal(signal.SIGKILL)
            killed.append((victim.number, time.time()))
            hold.unlink()
            print(f"{turn + 1:3d}  worker {victim.number} killed", flush=True)
        _settled(cluster, workers)
        books, events = cluster.books(), cluster.events()
    finally:
        cluster.close()
    return _figures(books, events, killed)


def _settled(cluster: Cluster, workers: int) -> list[Worker]:
    """Wait until all train and have made some exchanges together."""
    seen: dict[int, int] = {}

    def calm() -> bool:
        training = {worker.number for worker in cluster.training()}
        if len(training) != workers:
            return False
        now = {n: sum(line["event"] == "exchanged" for line in cluster.books()[n]) for n in training}
        for number, exchanges in now.items():
            seen.setdefault(number, exchanges)
        return all(exchanges - seen[number] >= CALM for number, exchanges in now.items())

    _wait(calm, f"{workers} workers to train together", cluster)
    return cluster.training()


def _all_wait(cluster: Cluster, victim: Worker) -> bool:
    """Whether the victim holds, and all others have come to the end of their blocks."""
    books = cluster.books()
    if books[victim.number][-1]["event"] != "holds":
        return False
    others = [books[worker.number] for worker in cluster.training() if worker.number != victim.number]
    return all(_made(lines) == cluster.job.period and lines[-1]["at"] < time.time() - 0.1 for lines in others)


def _made(lines: list[dict[str, Any]]) -> int:
    """Minibatches since the last exchange."""
    made = 0
    for line in reversed(lines):
        if line["event"] in ("exchanged", "started"):
            break
        made += line["event"] == "step"
    return made


def _wait(until: Any, what: str, cluster: Cluster) -> None:
    deadline = time.monotonic() + READY_S
    while not until():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {READY_S:g} s for {what}; {cluster.tail()}")
        time.sleep(POLL_S)


def _figures(books: count.Books, events: list[judge.Event], killed: list[tuple[int, float]]) -> dict[str, Any]:
    seen = count.exchanges(books)
    rows = [row for row in judge.recoveries(seen, events) if row["worker"] in dict(killed)]
    lost = {line["worker"]: line["at"] for line in events if line["kind"] == "lost"}
    visible = [lost[worker] - at for worker, at in killed if worker in lost]
    recovered = [row["seconds"] for row in rows if row["waiting"]]
    calm = judge.calm_exchanges(seen, events, [])
    found: dict[str, Any] = {
        "killed": len(killed),
        "all_waited": len(recovered),
        "seen_after_s": judge.spread(visible),
        "recovery_s": judge.spread(recovered),
        "exchange_s": judge.spread(calm),
    }
    if recovered and calm:
        found["recovery_ratio"] = round(found["recovery_s"]["median"] / found["exchange_s"]["median"], 2)
    return found
