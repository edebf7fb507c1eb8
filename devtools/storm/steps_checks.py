# SPDX-License-Identifier: Apache-2.0
"""What is checked of checkpoint steps: which are whole is read off the simulated disks, not asked of the code that
reads them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from devtools.world.disk import SimDisk

from paceline.checkpoint.files import GLOBAL, MANIFEST, own_sum, rank_names
from paceline.run.run import Run

NAME = re.compile(r"step-(\d+)(|\.old|\.partial|\.damaged)")
WHERE = ("", ".old", ".partial")
"""After a step's name: in this order a manifest of it is looked for."""


def _nothing(kind: str, about: dict[str, Any]) -> None:
    pass


class StepChecks:
    """Of one place.

    Args:
        place: the folder with the steps.
        disks: by rank.
        keep: how many steps are to be kept.
        problems: gets what is wrong.

    Attributes:
        agreed: steps of which all workers have said that they are written, oldest first.
        damaged: steps with a bit that has flipped.
    """

    def __init__(self, place: Path, disks: Sequence[SimDisk], keep: int, problems: list[str]) -> None:
        self._place, self._disks, self._keep, self._problems = place, disks, keep, problems
        self._each = list(dict.fromkeys(disks))  # hosts may share one
        self.agreed: list[int] = []
        self.damaged: set[int] = set()
        self._failures = 0

    def watch(self, run: Run, disk: SimDisk, told: Callable[[str, dict[str, Any]], None] = _nothing) -> None:
        """Check what the writer of a worker says and removes; `told` gets what it says."""
        checkpointer = run._parts.checkpointer
        assert checkpointer is not None
        writer = checkpointer._writer
        note, tidy = writer._note, writer._store.tidy

        def noted(kind: str, **about: Any) -> None:
            if kind == "save":
                self.saved(about["minibatches"])
            told(kind, about)
            note(kind, **about)

        def tidied(keep: int) -> None:
            tidy(keep)
            self.tidied(disk)

        writer._note, writer._store.tidy = noted, tidied  # type: ignore[method-assign]

    def flipped(self, file: str) -> None:
        """A bit of this file has flipped."""
        self.damaged |= {int(found[1]) for found in NAME.finditer(file)}

    def saved(self, number: int) -> None:
        """All workers have written a step."""
        if number in self.agreed:  # some worker said so before, perhaps long ago: the step may be too old to be kept
            return
        self.agreed = sorted([*self.agreed, number])
        if number not in self.damaged | self.whole():
            self._problems.append(f"step {number} is said to be written, and is not whole")

    @property
    def newest(self) -> int:
        """The newest step that must be there; 0: none."""
        there = [number for number in self.agreed[-self._keep :] if number not in self.damaged]
        return 0 if self._failed(self._failures) else max(there, default=0)

    def failures(self) -> int:
        """Operations of all disks that failed."""
        return sum(disk.failures for disk in self._each)

    def _failed(self, before: int) -> bool:
        return self.failures() > before

    def whole(self, named: bool = True) -> set[int]:
        """The steps that are whole on all disks.

        Args:
            named: only those that have their own name on a disk.
        """
        suffixes = WHERE[:2] if named else WHERE
        return {number for number in self._there(suffixes) if self._is_whole(number)}

    def _there(self, suffixes: Sequence[str]) -> set[int]:
        return {
            int(match[1])
            for disk in self._each
            for file in disk.files(self._place)
            if (match := NAME.fullmatch(file.parent.name)) and match[2] in suffixes
        }

    def _is_whole(self, number: int) -> bool:
        manifests = [self._manifest(disk, rank, number) for rank, disk in enumerate(self._disks)]
        return all(one is not None and one["files"] == (manifests[0] or {}).get("files") for one in manifests)

    def _manifest(self, disk: SimDisk, rank: int, number: int) -> dict[str, Any] | None:
        """That which a rank reads, if the files that it reads are those that were written."""
        folders = [self._place / f"step-{number:09d}{suffix}" for suffix in WHERE]
        folder = next((one for one in folders if disk.content(one / MANIFEST) is not None), folders[0])
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            manifest: dict[str, Any] = json.loads((disk.content(folder / MANIFEST) or b"").decode())
            names = [*rank_names(rank), *([GLOBAL] if rank == 0 else [])]
            sums = {name: hashlib.sha256(disk.content(folder / name) or b"").hexdigest() for name in names}
            if manifest["sum"] == own_sum(manifest) and sums.items() <= manifest["files"].items():
                return manifest
        return None

    def resumed(self, who: str, number: int, before: Resuming) -> None:
        """A worker goes on from a step; 0: from the beginning."""
        there = self.whole()
        if number and number not in before.whole:
            self._problems.append(f"{who} resumes from step {number}, which is not whole")
        if there and number < max(there) and not self._failed(before.failures):
            self._problems.append(f"{who} resumes from step {number}, and {max(there)} is whole")
        if number < self.newest:
            self._problems.append(f"{who} resumes from step {number}, and {self.newest} was agreed")

    def all_resumed(self, number: int) -> None:
        """All workers go on from a step."""
        self.agreed = [one for one in self.agreed if one <= number]
        self.damaged = {one for one in self.damaged if one <= number}
        self._failures = self.failures()

    def none_is_whole(self, who: str, before: Resuming | None) -> None:
        """A worker says so, and ends; the user then takes all steps away."""
        there = self.whole()
        if there and before is not None and not self._failed(before.failures):
            self._problems.append(f"{who} says that no step is whole, and {sorted(there)} are")
        elif self.newest:
            self._problems.append(f"{who} says that no step is whole, and {self.newest} was agreed")
        elif self._there(WHERE[:2]) and not (self.damaged or self._failed(self._failures)):
            self._problems.append(f"{who} says that no step is whole, and nothing has damaged one")

    def moved_away(self) -> None:
        """The user has taken all steps away."""
        self.agreed, self.damaged = [], set()
        for disk in self._each:
            disk.forget(self._place)

    def tidied(self, disk: SimDisk) -> None:
        """A worker has removed from a disk what is not needed any more."""
        names = {file.parent.name for file in disk.files(self._place)}
        kinds = [match[2] for name in sorted(names) if (match := NAME.fullmatch(name))]
        most = {"": self._keep, ".old": 1, ".partial": 0, ".damaged": self._keep}
        if any(kinds.count(kind) > limit for kind, limit in most.items()):
            self._problems.append(f"a disk holds {sorted(names)} after it was tidied, and {self._keep} are to be kept")


class Resuming:
    """What there was when the first worker of an attempt began to look for a step.

    Attributes:
        whole: steps that were whole, also under the name of one that is being written.
        failures: operations of the disks that had failed.
    """

    def __init__(self, checks: StepChecks) -> None:
        self.whole, self.failures = checks.whole(named=False), checks.failures()
