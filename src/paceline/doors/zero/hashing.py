# SPDX-License-Identifier: Apache-2.0
"""The order of sets of strings: the same on all workers, since splits are made by going through them.

Python takes the seed of its hashes when it starts, so a worker that was given none starts itself again, before it loads
anything that takes time.
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
    """Whether this worker has to start again: it is one of several, and its hashes are its own."""
    if sys.flags.ignore_environment or not is_random(environment):
        return False
    try:
        worker = schedulers.worker(environment)
    except UnsupportedError:
        return False  # is said where the worker attaches
    return worker is not None and worker.size > 1


def start_again() -> None:
    """As the same process, with the same arguments; does not return."""
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, VARIABLE: SEED})
