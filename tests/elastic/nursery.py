# SPDX-License-Identifier: Apache-2.0
"""Starts processes that cost no time: a parent that has imported everything forks them.

    python -m tests.elastic.nursery

Reads lines of JSON, {"environment", "phase", "out"}, and forks a worker of :mod:`tests.elastic.program` for each; says
{"pid"} for each, and {"ended", "code"} when one has ended. It starts no thread. It ends with its input.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from tests.elastic import program


def worker(order: dict[str, Any]) -> None:
    """The life of a forked process."""
    os.setsid()
    out = os.open(order["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(order["environment"])
    code = 1
    try:
        program.main(Path(order["phase"]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def say(what: dict[str, Any]) -> None:
    """To the test."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Fork until the input ends."""
    live: set[int] = set()
    torch.set_num_threads(1)
    torch.optim.SGD(program.Model(1).parameters(), lr=1.0).step()  # imports what torch imports when it is needed
    say({"ready": True})
    rest = b""
    while True:
        if select.select([0], [], [], 0.01)[0]:
            piece = os.read(0, 1 << 16)
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                pid = os.fork()
                if pid == 0:
                    worker(json.loads(line))
                live.add(pid)
                say({"pid": pid})
        for pid in list(live):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                live.discard(pid)
                say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
    for pid in live:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
