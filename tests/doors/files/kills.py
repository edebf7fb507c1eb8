# SPDX-License-Identifier: Apache-2.0
"""Kills a run of one worker before each change of a file that it makes, and lets it go on.

The bytes have to be those of a run that was never killed. Prints the number of points.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from paceline_plugins.files.plan import Plan
from paceline_plugins.files.worker import train
from tests.doors.files.plans import MOMENTUM, plan, rows

POINTS = ("os.rename", "os.remove", "shutil.rmtree", "subprocess.Popen", "os.rmdir")


def asked() -> Plan:
    """Three blocks of one worker."""
    return plan(rule=MOMENTUM, parts=1, epochs=3, keep=2, loss="loss=(.+)")


def forked(kill_at: int | None) -> tuple[int, int]:
    """Train in a child that is killed before its point number `kill_at`; its exit status, and the points passed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        passed = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal passed
            if event in POINTS:
                passed += 1
                os.write(write, b".")
                if passed == kill_at:
                    os.kill(os.getpid(), signal.SIGKILL)

        code = 1
        try:
            sys.addaudithook(hook)
            train(asked())
            code = 0
        finally:
            sys.stderr.flush()
            os._exit(code)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        points = len(pipe.read())
    return os.waitpid(child, 0)[1], points


def outcome() -> tuple[bytes, dict[str, bytes], list[tuple[Any, ...]]]:
    """The final model, the merged ones, and the journal without its times."""
    merged = {path.name: path.read_bytes() for path in Path("work/merged").iterdir()}
    return Path("out.bin").read_bytes(), merged, [(row["block"], row["lr"], row["loss"]) for row in rows()]


def main() -> None:
    """Kill at all points but those of the first block, which are those of the second."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        train(asked())  # here, so that no child has to import anything
        wanted = outcome()
        shutil.rmtree("work")
        status, points = forked(None)
        assert (status, outcome()) == (0, wanted)
        first = points // 3
        for kill_at in range(first, points + 1):
            shutil.rmtree("work")
            Path("out.bin").unlink(missing_ok=True)
            status, _ = forked(kill_at)
            assert os.WIFSIGNALED(status), (kill_at, status)
            status, _ = forked(None)
            assert status == 0, (kill_at, status)
            assert outcome() == wanted, kill_at
        os.chdir("/")
    print(points - first + 1)


if __name__ == "__main__":
    main()
