# SPDX-License-Identifier: Apache-2.0
"""Becomes one worker of a launcher, and sees to it that the worker ends with the launcher.

A launcher that is killed cannot stop its workers. They would go on, unseen, and when the same run is started again both
would write into the same checkpoints and logs. On Linux the kernel ends a worker at the end of the thread that started
it; this small program asks for that and then turns into the worker. It needs nothing but the standard library (it is
run by its path, not imported). Elsewhere it changes nothing. Workers of elastic runs outlive their launcher on purpose,
see keeper.py.
"""

from __future__ import annotations

import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
NOT_STARTED = 127  # as a shell says it


def become(launcher: int, command: list[str]) -> int:
    """Turn into `command`, which ends with the process `launcher`; returns only where that cannot be."""
    if sys.platform == "linux":
        _tie()
        if os.getppid() != launcher:  # it ended before it was asked for
            return 128 + signal.SIGKILL
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and what is ignored would stay so in the worker
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"cannot start {command[0]}: {error}", file=sys.stderr)
        return NOT_STARTED


def _tie() -> None:
    """Ask the kernel; where it cannot be asked, the worker runs all the same."""
    try:
        import ctypes

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (ImportError, OSError, AttributeError):
        return


if __name__ == "__main__":
    raise SystemExit(become(int(sys.argv[1]), sys.argv[2:]))
