# SPDX-License-Identifier: Apache-2.0
"""The work folder of `paceline blocks`, before the workers start."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.cli.console import refuse, refusing
from paceline.cli.run.checks import Lock

if TYPE_CHECKING:
    from paceline_plugins.files.plan import Plan

OURS = ("merged", "steps", "scratch")


def lock(folder: Path, host_index: int) -> Lock:
    """Make the folder, and hold its lock; refuses a folder that another launcher of this host uses."""
    with refusing():
        folder.mkdir(parents=True, exist_ok=True)
        return Lock(folder, f"lock-{host_index}")


def prepare(plan: Plan, host_index: int, overwrite: bool) -> Path:
    """Write the plan for the workers of this host; returns its file. Refuses to continue with other options."""
    from paceline_plugins.files.plan import Plan, check_continues  # late: it loads torch
    from paceline_plugins.files.workplace import write

    folder = Path(plan.work)
    place = folder / f"plan-{host_index}.json"
    with refusing():
        if overwrite or not any((folder / name).exists() for name in ("merged", "steps")):  # else nothing is done yet
            _clear(folder, place)
        elif not place.exists():
            refuse(f"{folder} holds a run without {place.name}; give another --work, or --overwrite to begin anew")
        else:
            check_continues(plan, Plan.read(place))
        write(place, plan.text.encode())
    return place


def _clear(folder: Path, place: Path) -> None:
    """Remove an earlier run; its plan last, so that a kill in between leaves a run that can be continued.

    Hosts that share the folder may all do so: none of them trains before all have met.
    """
    for name in OURS:
        shutil.rmtree(folder / name, ignore_errors=True)
    for path in (folder / "journal.json", place):
        path.unlink(missing_ok=True)
