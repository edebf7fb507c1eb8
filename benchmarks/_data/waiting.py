# SPDX-License-Identifier: Apache-2.0
"""How long a step waits for its data behind a slow source, with fetching ahead.

The source takes 50 ms to answer a request and sends 200 Mbit/s in all. A block feeds several steps of 100 ms, so that
the source can bring more than the steps use; that it does so in time is the cache's work. A wait without load stands
for the step. What is counted is the time between steps, from the second block on.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from paceline.data.cache import Cache

PIECE_BYTES = 16 << 10


class Line:
    """A line of so many bits a second that all answers share."""

    def __init__(self, bits_per_s: float) -> None:
        self._bytes_per_s, self._lock, self._free_at = bits_per_s / 8, threading.Lock(), 0.0

    def send(self, count: int) -> None:
        """Wait until the line has carried `count` bytes more."""
        with self._lock:
            self._free_at = max(self._free_at, time.monotonic()) + count / self._bytes_per_s
            ready = self._free_at
        time.sleep(max(0.0, ready - time.monotonic()))


@contextmanager
def slow_source(body: bytes, delay_s: float, bits_per_s: float) -> Iterator[str]:
    """The address of a server that answers every path with `body`."""
    line = Line(bits_per_s)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(delay_s)
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            for begin in range(0, len(body), PIECE_BYTES):
                piece = body[begin : begin + PIECE_BYTES]
                line.send(len(piece))
                self.wfile.write(piece)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class Peak(threading.Thread):
    """Looks a thousand times a second how many bytes a directory holds, downloads under way included."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory, self.bytes, self.stop = directory, 0, threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.001):
            total = 0
            for path in self.directory.iterdir():
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            self.bytes = max(self.bytes, total)


def steps(cache: Cache, urls: list[str], steps_per_block: int, step_s: float) -> tuple[float, float]:
    """Go through the blocks; seconds between steps after the first block, and seconds of all that time."""
    never, waited = threading.Event(), 0.0
    began = ended = time.perf_counter()
    for number, url in enumerate(urls):
        if number == 1:
            began, waited = ended, 0.0
        with cache.open(url) as path:
            for step in range(steps_per_block):
                size = path.stat().st_size // steps_per_block
                with open(path, "rb") as file:
                    file.seek(step * size)
                    assert len(file.read(size)) == size
                waited += time.perf_counter() - ended
                never.wait(step_s)
                ended = time.perf_counter()
    return waited, ended - began


def waiting(
    *, blocks: int = 20, block_bytes: int = 4 << 20, steps_per_block: int = 3, step_s: float = 0.1, cap_blocks: int = 5
) -> dict[str, Any]:
    """The fraction of time that steps waited after the first block, and the peak of bytes on disk against the cap."""
    directory = Path(tempfile.mkdtemp(prefix="waiting-"))
    cap = cap_blocks * block_bytes
    peak = Peak(directory)
    try:
        with slow_source(bytes(block_bytes), 0.05, 200e6) as address, Cache(directory, cap) as cache:
            urls = [f"{address}/{number}" for number in range(blocks)]
            peak.start()
            cache.prefetch(urls)
            waited, total = steps(cache, urls, steps_per_block, step_s)
            stats = next(iter(cache.stats().values()))
        peak.stop.set()
        peak.join()
    finally:
        shutil.rmtree(directory)
    return {
        "waiting": round(waited / total, 5),
        "waited_s": round(waited, 4),
        "total_s": round(total, 2),
        "hits": stats.hits,
        "misses": stats.misses,
        "peak_bytes": peak.bytes,
        "cap_bytes": cap,
        "block_bytes": block_bytes,
        "peak_over_cap": round(peak.bytes / cap, 4),
        "source_share": round(blocks * block_bytes * 8 / 200e6 / (blocks * steps_per_block * step_s), 3),
    }
