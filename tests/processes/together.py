# SPDX-License-Identifier: Apache-2.0
"""Processes of one launch begin together, so that a short deadline of theirs says nothing about how they started."""

from __future__ import annotations

import os
import time
from pathlib import Path

DEADLINE_S = 150.0


def all_here(directory: Path) -> None:
    """Wait until every process of this launch has come to this line: importing torch takes as long as it takes."""
    (directory / f"here.{os.environ['RANK']}").touch()
    end = time.monotonic() + DEADLINE_S
    while not all((directory / f"here.{rank}").exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        assert time.monotonic() < end, "not all processes have started"
        time.sleep(0.01)
