# SPDX-License-Identifier: Apache-2.0
"""Where the steps of a run lie: one directory a step, `step-` and the minibatches that each worker had made.

::

    DIR/step-000000120/             a whole step: the same files as those of `run.save`
    DIR/step-000000160.partial/     one that is being written, or was when all were killed; never read
    DIR/step-000000140.damaged/     one that was found damaged when the run was resumed from an older one

On a file system a step gets its name when it is whole. Object stores cannot rename: there the manifest is written last,
and a step without one does not exist (:mod:`.remote`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.agreement import Working
from paceline.checkpoint.claim import Claim, DirectoryClaim
from paceline.checkpoint.files import MANIFEST, Content
from paceline.checkpoint.saving import remove, write
from paceline.checkpoint.steps import STEP, Needed, step_name
from paceline.communication import Transport
from paceline.errors import CheckpointError


class StepStore(Protocol):
    """A place with steps in it.

    Attributes:
        shown: the place as it may stand in a message.
    """

    shown: str

    def name(self, number: int) -> str:
        """A step as it may stand in a message."""

    def numbers(self) -> list[int]:
        """The steps that are there, oldest first."""

    def fetch(self, number: int, needed: Needed) -> Path:
        """A local directory with the manifest of a step and the files that are wanted of it."""

    def write(
        self,
        number: int,
        transport: Transport,
        about: dict[str, Any],
        content: Callable[[], Content],
        working: Working,
    ) -> tuple[int, bool]:
        """Make a step, on all workers together; see :func:`paceline.checkpoint.saving.write`."""

    def tidy(self, keep: int) -> None:
        """Remove all but the newest `keep` steps, and unfinished ones; called by one worker of a file system."""

    def set_aside(self, numbers: Iterable[int]) -> None:
        """These steps are damaged and shall not be found again."""

    def claim(self, run: str) -> Claim:
        """What a run has of the place, which nobody has taken yet."""

    def close(self) -> None:
        """Give back what was only needed to read steps."""


class DirectoryStore:
    """Steps in a directory.

    Args:
        path: of the directory; a run that is to write there makes it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self.shown = path, str(path)

    def path(self, number: int) -> Path:
        """Where a step is."""
        return self._path / step_name(number)

    def name(self, number: int) -> str:
        return str(self.path(number))

    def numbers(self) -> list[int]:
        if not self._path.exists():
            return []
        if not self._path.is_dir():
            raise CheckpointError(f"{self._path} is no directory; give one for the steps of this run")
        found = set()
        for entry in self._path.iterdir():
            match = STEP.fullmatch(entry.name.removesuffix(".old"))  # killed between two renames
            if match and entry.is_dir():
                found.add(int(match[1]))
        return sorted(found)

    def fetch(self, number: int, needed: Needed) -> Path:
        return self.path(number)

    def write(
        self,
        number: int,
        transport: Transport,
        about: dict[str, Any],
        content: Callable[[], Content],
        working: Working,
    ) -> tuple[int, bool]:
        return write(self.path(number), transport, about, content, working)

    def tidy(self, keep: int) -> None:
        whole = [number for number in self.numbers() if (self.path(number) / MANIFEST).is_file()]
        for number in whole[:-keep]:
            remove(self.path(number))
        aside = sorted(entry for entry in self._path.iterdir() if _kind(entry) == "damaged")
        unfinished = [entry for entry in self._path.iterdir() if _kind(entry) == "partial"]
        for entry in [*aside[:-keep], *unfinished]:
            remove(entry)

    def set_aside(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            for path in (self.path(number), self.path(number).with_name(step_name(number) + ".old")):
                target = path.with_name(step_name(number) + ".damaged")
                with contextlib.suppress(FileNotFoundError):  # another host, which shares the disk, was first
                    if path.exists() and target.exists():
                        remove(target)
                    path.rename(target)

    def claim(self, run: str) -> Claim:
        return DirectoryClaim(self._path, run)

    def close(self) -> None:
        """Nothing was made to read."""


def _kind(entry: Path) -> str:
    """ "partial" or "damaged" where the name is that of such a step; else nothing."""
    stem, _, kind = entry.name.partition(".")
    return kind if STEP.fullmatch(stem) and kind in ("partial", "damaged") and entry.is_dir() else ""


def store_for(place: str | Path) -> StepStore:
    """The store that a directory or a URL names.

    Raises:
        UnsupportedError: nothing that is installed opens such a URL.
    """
    from paceline.checkpoint.remote import RemoteStore, local_path

    path = local_path(place)
    return DirectoryStore(path) if path is not None else RemoteStore(str(place))
