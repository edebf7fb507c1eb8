# SPDX-License-Identifier: Apache-2.0
"""The program of the tests' processes: print "ready", wait for a line, work, and print JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.paths import python_path

ROOT = Path(__file__).parents[3]


class Worker:
    """A process that runs `work` of this file with a cache of its own on a shared directory."""

    def __init__(self, work: str, directory: Path, cap: int | None, *arguments: Any) -> None:
        environment = {**os.environ, "PYTHONPATH": python_path(ROOT), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.data.cache.programs", json.dumps([work, str(directory), cap, *arguments])],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def result(self, timeout_s: float = 90) -> Any:
        output, _ = self.process.communicate(timeout=timeout_s)
        assert self.process.returncode == 0, output
        return json.loads(output)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()


def read_all(cache: Any, urls: list[str]) -> Any:
    """Read each url in turn; the sizes, and what this process fetched."""
    sizes = [len(cache.read(url)) for url in urls]
    return {"sizes": sizes, "fetched": sum(s.fetched_bytes for s in cache.stats().values())}


def hold(cache: Any, url: str) -> Any:
    """Keep a file open until a line comes."""
    with cache.open(url) as path:
        print("held", flush=True)
        sys.stdin.readline()
        return path.read_bytes().decode()


def prefetch(cache: Any, urls: list[str]) -> Any:
    """Prefetch the files, and read each in turn."""
    cache.prefetch(urls)
    return read_all(cache, urls)


def main() -> None:
    from paceline_plugins.data.cache import Cache

    work, directory, cap, *arguments = json.loads(sys.argv[1])
    with Cache(directory, cap) as cache:
        print("ready", flush=True)
        sys.stdin.readline()
        print(json.dumps(globals()[work](cache, *arguments)))


if __name__ == "__main__":
    main()
