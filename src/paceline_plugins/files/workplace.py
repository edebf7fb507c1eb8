# SPDX-License-Identifier: Apache-2.0
"""The files of a run.

::

    WORK/journal.json             the options, and a row for each block: rank 0's
    WORK/merged/block-00003.mdl   the merged model after a block; the newest are kept: rank 0's
    WORK/steps/step-000000003     checkpoints of paceline, with which a run continues; the newest two are kept
    WORK/scratch/rank-002/        the files of a worker's invocation
    WORK/plan-0.json              the options, from the launcher of machine 0 to its workers

Whatever is kept is written beside its place and renamed, so that a kill leaves the old file or the new one. Of a block,
the merged model comes first, then the checkpoint, then the journal: a run that is continued repeats at most the block
that has no checkpoint, with the same bytes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from paceline.checkpoint.files import step_name
from paceline_plugins.files.plan import Plan

KEPT_STEPS = 2
_MERGED = re.compile(r"block-(\d{5,})")


class Workplace:
    """The files of a run on this machine.

    Args:
        folder: of all of them.
        suffix: of the model file, with its dot.
    """

    def __init__(self, folder: Path, suffix: str) -> None:
        self.folder, self.suffix = folder, suffix
        self.merged, self.steps = folder / "merged", folder / "steps"
        self.journal = folder / "journal.json"

    def step(self, block: int) -> Path:
        """The checkpoint after so many blocks."""
        return self.steps / step_name(block)

    def has_steps(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        return self.steps.is_dir() and any(self.steps.iterdir())

    def scratch(self, rank: int) -> Path:
        """An empty folder for a worker's invocations."""
        place = self.folder / "scratch" / f"rank-{rank:03d}"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        return place

    def write_merged(self, block: int, data: bytes) -> Path:
        """Write the merged model after so many blocks."""
        self.merged.mkdir(exist_ok=True)
        path = self.merged / f"block-{block:05d}{self.suffix}"
        write(path, data)
        return path

    def write_journal(self, plan: Plan, rows: list[dict[str, Any]], done: bool) -> None:
        """Replace the journal."""
        text = json.dumps({"plan": json.loads(plan.text), "done": done, "blocks": rows}, indent=1)
        write(self.journal, text.encode())

    def prune(self, keep: int) -> None:
        """Remove merged models and checkpoints but the newest; one that cannot be removed stays."""
        for path in _older(self.merged, keep):
            path.unlink(missing_ok=True)
        for path in _older(self.steps, KEPT_STEPS):
            shutil.rmtree(path, ignore_errors=True)


def write(path: Path, data: bytes) -> None:
    """Replace a file atomically and durably."""
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def _older(folder: Path, keep: int) -> list[Path]:
    """All but the newest entries of a folder, by their numbers."""
    if not folder.is_dir():
        return []
    found = sorted((path for path in folder.iterdir() if _number(path) >= 0), key=_number)
    return found[: max(0, len(found) - keep)]


def _number(path: Path) -> int:
    match = _MERGED.match(path.name) or re.fullmatch(r"step-(\d+)", path.name)
    return int(match[1]) if match and not path.name.endswith(".new") else -1
