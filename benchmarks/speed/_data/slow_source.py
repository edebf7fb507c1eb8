# SPDX-License-Identifier: Apache-2.0
"""A slow web server in a process of its own, which also watches how many bytes a directory holds.

    python slow_source.py BODY_BYTES DELAY_S BITS_PER_S DIRECTORY

prints its address, serves every path until its input ends, and prints the most bytes that it saw in the directory,
downloads under way included. All answers share one line of BITS_PER_S.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

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


def handler(body: bytes, delay_s: float, line: Line) -> type[BaseHTTPRequestHandler]:
    """Answers every path with `body`."""

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

    return Handler


class Peak(threading.Thread):
    """Looks two hundred times a second how many bytes a directory holds."""

    def __init__(self, directory: Path) -> None:
        super().__init__(daemon=True)
        self.directory, self.bytes, self.stop = directory, 0, threading.Event()

    def run(self) -> None:
        while not self.stop.wait(0.005):
            total = 0
            for path in self.directory.iterdir():
                try:
                    total += path.stat().st_size
                except FileNotFoundError:
                    continue
            self.bytes = max(self.bytes, total)


def main() -> None:
    """Serve until standard input ends."""
    count, delay_s, bits_per_s, directory = sys.argv[1:]
    line = Line(float(bits_per_s))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(bytes(int(count)), float(delay_s), line))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    peak = Peak(Path(directory))
    peak.start()
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    sys.stdin.read()
    peak.stop.set()
    peak.join()
    print(json.dumps({"peak_bytes": peak.bytes}))


class SlowSource:
    """Such a process."""

    def __init__(self, body_bytes: int, delay_s: float, bits_per_s: float, directory: Path) -> None:
        command = [sys.executable, __file__, str(body_bytes), str(delay_s), str(bits_per_s), str(directory)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def close(self) -> int:
        """End it; the most bytes that the directory held."""
        said, _ = self._process.communicate(timeout=60)
        return int(json.loads(said)["peak_bytes"])


if __name__ == "__main__":
    main()
