# SPDX-License-Identifier: Apache-2.0
"""Links of 10 Mbit/s and a model of 4 MB: an exchange takes seconds, and nobody may be declared dead."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

from devtools.emulation import EmulatedNetwork

from _faults import count, judge
from _faults.cluster import Cluster
from _faults.job import Job

HOSTS, RATE_MBIT, DELAY_MS = 4, 10.0, 10.0
HIDDEN = 488  # 4.0 MB at 32 bits
MINIBATCH_S = 0.3


def slow(directory: Path, minutes: float, seed: int) -> dict[str, Any]:
    """Train for about so long; who was lost, and what an exchange takes against what the wire takes."""
    block_s = 16 * MINIBATCH_S + 6.0
    job = Job(
        books=str(directory / "books"),
        corpus=str(directory / "corpus.safetensors"),
        minibatches=int(60 * minutes / block_s) * 16 * HOSTS,
        hidden=HIDDEN,
        minibatch_s=MINIBATCH_S,
        seed=seed,
    )
    with EmulatedNetwork(HOSTS, RATE_MBIT, DELAY_MS) as network:
        cluster = Cluster(directory, job, network)
        begun = time.monotonic()
        try:
            for host in range(HOSTS):
                cluster.start(host)
            codes = cluster.wait(180 * minutes + 120)
        finally:
            cluster.close()
    books, events = cluster.books(), cluster.events()
    seen = count.exchanges(books)
    full = [one for one in seen.values() if len(one.over) == HOSTS]
    took = [one.done - one.last_arrival for one in full]
    wire_s = wire(job)
    return {
        **count.samples(books, seen, job.samples),
        "agree": len(set(count.digests(books).values())) == 1,
        "seconds": round(time.monotonic() - begun, 1),
        "declared_lost": [line["worker"] for line in events if line["kind"] == "lost"],
        "exit_codes": codes,
        "exchange_s": judge.spread(took),
        "wire_s": round(wire_s, 3),
        "over_wire": round(statistics.median(took) / wire_s, 3) if took else None,
    }


def wire(job: Job) -> float:
    """Seconds in which a link carries 2 (N-1)/N of the model and its buffer, by the nominal rate."""
    from _faults.program import Counted

    state = Counted(job.hidden).state_dict().values()
    nbytes = sum(x.numel() * x.element_size() for x in state)
    return 2 * (HOSTS - 1) / HOSTS * nbytes * 8 / (RATE_MBIT * 1e6)
