# SPDX-License-Identifier: Apache-2.0
"""Where the steps of a run are stored: one directory a step, named after the minibatches that each worker had made.

::

    DIR/step-000000120/             a whole step: the same files as those of `run.save`
    DIR/frozen/                     tensors that training does not change, once for all steps (:mod:`.files`)
    DIR/step-000000160.partial/     being written, or left when all workers were killed; not listed
    DIR/step-000000140.damaged/     was damaged; the run resumed from an older one

On a file system a step gets its name when it is complete. Object stores cannot rename: there the manifest is written
last, and a step without one does not exist (:mod:`.remote`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from paceline.checkpoint.claim import Claim, DirectoryClaim
from paceline.checkpoint.files import (
    FROZEN,
    MANIFEST,
    STEP,
    Content,
    Needed,
    Working,
    frozen_name,
    read_manifest,
    renamed,
    step_name,
)
from paceline.checkpoint.saving import remove, write
from paceline.checkpoint.urls import local_path
from paceline.communication import Transport
from paceline.core import runtime
from paceline.errors import CheckpointError
from paceline.extensions import STORES, extension


class StepStore(Protocol):
    """Steps in a directory or below a URL."""

    shown: str  # its name for messages, without secrets

    def name(self, number: int) -> str:
        """The name of a step for messages."""

    def numbers(self) -> list[int]:
        """The steps, oldest first."""

    def fetch(self, number: int, needed: Needed) -> Path:
        """A local directory with a step's manifest and the files of it that are needed."""

    def write(
        self,
        number: int,
        transport: Transport,
        about: dict[str, Any],
        content: Callable[[], Content],
        working: Working,
    ) -> tuple[int, bool]:
        """Write a step; every worker calls it. See :func:`paceline.checkpoint.saving.write`."""

    def frozen(self, key: str) -> Path:
        """A local file with the values of a frozen tensor; CheckpointError if it cannot be fetched."""

    def tidy(self, keep: int) -> None:
        """Remove unfinished steps, all but the newest `keep`, and frozen tensors that none of these names; called by
        one worker of each file system."""

    def set_aside(self, numbers: Iterable[int]) -> None:
        """Hide these damaged steps from later searches."""

    def claim(self, run: str) -> Claim:
        """A run's claim to the store, not taken yet."""

    def close(self) -> None:
        """Release what was needed only to read steps."""


class DirectoryStore:
    """Steps in a directory; a run that writes there creates it."""

    def __init__(self, path: Path) -> None:
        self._path, self.shown = path, str(path)

    def path(self, number: int) -> Path:
        """The directory of a step."""
        return self._path / step_name(number)

    def _paths(self, number: int) -> tuple[Path, Path]:
        """Where a step's directory can be: at its own name, or renamed to make room for its successor."""
        return self.path(number), renamed(self.path(number))

    def name(self, number: int) -> str:
        return str(self.path(number))

    def numbers(self) -> list[int]:
        disk = runtime.disk()
        if not disk.exists(self._path):
            return []
        if not disk.is_folder(self._path):
            raise CheckpointError(f"{self._path} is no directory; give one for the steps of this run")
        numbers = set()
        for name in disk.names(self._path):
            match = STEP.fullmatch(name.removesuffix(".old"))  # killed between two renames
            if match and disk.is_folder(self._path / name):
                numbers.add(int(match[1]))
        return sorted(numbers)

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

    def frozen(self, key: str) -> Path:
        return self._path / FROZEN / frozen_name(key)

    def tidy(self, keep: int) -> None:
        disk = runtime.disk()
        numbers = self.numbers()
        whole = [number for number in numbers if disk.is_file(self.path(number) / MANIFEST)]
        half = [number for number in numbers if whole and number < whole[-1] and number not in whole]
        for number in [*whole[:-keep], *half]:  # half: of an earlier process that was killed while it removed them
            for path in self._paths(number):
                remove(path)
        there = [self._path / name for name in disk.names(self._path)]
        aside = [entry for entry in there if _kind(entry) == "damaged"]
        unfinished = [entry for entry in there if _kind(entry) == "partial"]
        for entry in [*aside[:-keep], *unfinished]:
            remove(entry)
        if disk.is_folder(self._path / FROZEN):
            stay = {frozen_name(key) for n in whole[-keep:] for key in read_manifest(self.path(n)).get("frozen", ())}
            for name in disk.names(self._path / FROZEN):
                if name not in stay:
                    disk.remove(self._path / FROZEN / name)

    def set_aside(self, numbers: Iterable[int]) -> None:
        disk = runtime.disk()
        for number in numbers:
            for path in self._paths(number):
                target = path.with_name(step_name(number) + ".damaged")
                with contextlib.suppress(FileNotFoundError):  # another host that shares the disk was first
                    if disk.exists(path) and disk.exists(target):
                        remove(target)
                    disk.replace(path, target)

    def claim(self, run: str) -> Claim:
        return DirectoryClaim(self._path, run)

    def close(self) -> None:
        """Nothing to release."""


def _kind(entry: Path) -> str:
    """ "partial" or "damaged" for the name of such a step; else ""."""
    stem, _, kind = entry.name.partition(".")
    return kind if STEP.fullmatch(stem) and kind in ("partial", "damaged") and runtime.disk().is_folder(entry) else ""


def store_for(place: str | Path) -> StepStore:
    """The store of a directory or a URL; UnsupportedError if no installed library opens it."""
    path = local_path(place)
    return DirectoryStore(path) if path is not None else extension(STORES, "remote")(str(place))
