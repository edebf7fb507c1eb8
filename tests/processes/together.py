# SPDX-License-Identifier: Apache-2.0
"""How the processes of one launch begin: together, so that a short deadline of theirs says nothing about how they
started, and each with a deadline for all that it does."""

from __future__ import annotations

import faulthandler
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch

DEADLINE_S = 150.0


def all_here(directory: Path) -> None:
    """Wait until every process of this launch has come to this line: importing torch takes as long as it takes."""
    (directory / f"here.{os.environ['RANK']}").touch()
    end = time.monotonic() + DEADLINE_S
    while not all((directory / f"here.{rank}").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        assert time.monotonic() < end, "not all processes have started"
        time.sleep(0.01)


def run_named(programs: dict[str, Any], name: str, directory: str, *rest: str) -> None:
    """Run one of the programs, with warnings as errors and a deadline of its own, with a trace."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    faulthandler.dump_traceback_later(180, exit=True)
    programs[name](Path(directory), *rest)
    faulthandler.cancel_dump_traceback_later()
