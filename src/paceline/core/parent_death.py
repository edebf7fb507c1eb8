# SPDX-License-Identifier: Apache-2.0
"""Become a worker that ends with its launcher; a program of the standard library alone, which is run by its path.

A launcher that is killed cannot stop its workers. If they went on, and the run was started again, both would write the
same checkpoints and logs. On Linux the kernel kills a process at the death of the thread that started it, if asked.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
NOT_STARTED = 127  # as a shell says it


def starter() -> list[str]:
    """The beginning of a command line; the command that follows ends with this process."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid())]


def exec_worker(launcher: int, command: list[str]) -> int:
    """Execute `command`, which ends with the process `launcher`; returns an exit code only on failure."""
    request_death_signal()
    if os.getppid() != launcher:  # it ended before the request
        return 128 + signal.SIGKILL
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and the worker would inherit that
        signal.signal(number, signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return NOT_STARTED


def request_death_signal() -> None:
    """Ask the kernel for SIGKILL at the parent's death; without it the worker still runs."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return


if __name__ == "__main__":
    raise SystemExit(exec_worker(int(sys.argv[1]), sys.argv[2:]))
