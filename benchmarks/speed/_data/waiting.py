# SPDX-License-Identifier: Apache-2.0
"""How long a step waits for its data behind a slow source, with fetching ahead.

The source takes 50 ms to answer a request and sends 200 Mbit/s in all. A block feeds several steps of 100 ms, so that
the source can bring more than the steps use; that it does so in time is the cache's work. A wait without load stands
for the step. What is counted is the time between steps, from the second block on.

Small files of the same source take little more than its answers do; so they come as fast as requests are in flight.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from _data.slow_source import SlowSource
from paceline_plugins.data.cache import Cache

DELAY_S, BITS_PER_S = 0.05, 200e6


def steps(cache: Cache, urls: list[str], steps_per_block: int, step_s: float) -> tuple[list[float], float]:
    """Go through the blocks; seconds before each step, and the seconds of all but the first block."""
    never = threading.Event()
    waits: list[float] = []
    began = ended = time.perf_counter()
    for number, url in enumerate(urls):
        if number == 1:
            began = ended
        with cache.open(url) as path:
            size = path.stat().st_size // steps_per_block
            with open(path, "rb", buffering=0) as file:
                for _ in range(steps_per_block):
                    assert len(file.read(size)) == size
                    waits.append(time.perf_counter() - ended)
                    never.wait(step_s)
                    ended = time.perf_counter()
    return waits, ended - began


def waiting(
    *, blocks: int = 20, block_bytes: int = 4 << 20, steps_per_block: int = 3, step_s: float = 0.1, cap_blocks: int = 5
) -> dict[str, Any]:
    """The fraction of time that steps waited after the first block, and the peak of bytes on disk against the cap."""
    directory = Path(tempfile.mkdtemp(prefix="waiting-"))
    cap = cap_blocks * block_bytes
    try:
        source = SlowSource(block_bytes, DELAY_S, BITS_PER_S, directory)
        with Cache(directory, cap) as cache:
            urls = [f"{source.address}/{number}" for number in range(blocks)]
            cache.prefetch(urls)
            waits, total = steps(cache, urls, steps_per_block, step_s)
            (stats,) = cache.stats().values()
        peak_bytes = source.close()
    finally:
        shutil.rmtree(directory)
    waits = waits[steps_per_block:]
    return {
        "waiting": round(sum(waits) / total, 5),
        "waited_s": round(sum(waits), 4),
        "longest_wait_s": round(max(waits), 4),
        "median_wait_s": round(statistics.median(waits), 5),
        "total_s": round(total, 2),
        "hits": stats.hits,
        "misses": stats.misses,
        "peak_bytes": peak_bytes,
        "cap_bytes": cap,
        "block_bytes": block_bytes,
        "peak_over_cap": round(peak_bytes / cap, 4),
        "source_share": round(block_bytes * 8 / BITS_PER_S / (steps_per_block * step_s), 3),
    }


def small_files(*, files: int = 64, file_bytes: int = 64 << 10, threads: int = 4) -> dict[str, Any]:
    """How many answers were awaited at a time, of as many as there are threads, while small files were fetched."""
    directory = Path(tempfile.mkdtemp(prefix="small-"))
    try:
        source = SlowSource(file_bytes, DELAY_S, BITS_PER_S, directory)
        urls = [f"{source.address}/{number}" for number in range(files)]
        with Cache(directory, threads=threads) as cache:
            began = time.perf_counter()
            cache.prefetch(urls)
            for url in urls:
                cache.read(url)
            seconds = time.perf_counter() - began
        source.close()
    finally:
        shutil.rmtree(directory)
    return {"in_flight": round(files * DELAY_S / seconds, 2), "threads": threads, "files": files}
