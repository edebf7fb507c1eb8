# SPDX-License-Identifier: Apache-2.0
"""Makes sets of strings iterate in the same order on all workers, since programs split data by iterating over them.

Python reads its hash seed at start. A worker without one restarts itself, before any slow import.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from paceline.communication import schedulers
from paceline.errors import UnsupportedError

VARIABLE = "PYTHONHASHSEED"
SEED = "0"


def is_random(environment: Mapping[str, str]) -> bool:
    """Whether Python's hashes of strings differ from process to process."""
    return environment.get(VARIABLE, "random") in ("", "random")


def needed(environment: Mapping[str, str]) -> bool:
    """Whether this worker must restart: it is one of several, and its hash seed is random."""
    if sys.flags.ignore_environment or not is_random(environment):
        return False
    try:
        worker = schedulers.worker(environment)
    except UnsupportedError:
        return False  # attach reports it
    return worker is not None and worker.size > 1


def start_again() -> None:
    """Restart the same process with the same arguments; does not return."""
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: SEED})
