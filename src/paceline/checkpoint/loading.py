# SPDX-License-Identifier: Apache-2.0
"""Loads the checkpoint of `run.resume`, the same on all workers: a named one, or the newest intact step of a store."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from paceline.checkpoint.files import (
    GLOBAL,
    MANIFEST,
    STEP,
    Needed,
    Read,
    all_names,
    all_well,
    check_files,
    is_step,
    rank_names,
    read_manifest,
    read_rank,
    reader,
    renamed,
)
from paceline.checkpoint.store import StepStore, store_for
from paceline.checkpoint.urls import local_path, shown
from paceline.communication import Transport
from paceline.core import runtime
from paceline.core.world import World
from paceline.errors import CheckpointError


@dataclass
class FoundCheckpoint:
    """A checkpoint that is intact on all workers."""

    number: int = -1  # of the step; -1 if there is none
    name: str = ""  # for messages
    manifest: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None  # this worker's, if as many workers saved it
    damaged: dict[int, str] = field(default_factory=dict)  # newer steps that are damaged -> error
    frozen_file: Callable[[str], Path] = Path  # gives the file of a frozen tensor's values, by its key

    @property
    def read_frozen(self) -> Read:
        """Reads the values of frozen tensors."""
        return reader(self.manifest, self.frozen_file)


def newest(store: StepStore, transport: Transport) -> FoundCheckpoint:
    """The newest step that is intact for all workers; every worker calls it and gets the same one."""
    damaged: dict[int, str] = {}
    for number in reversed(everywhere(store, transport)):
        checkpoint, why = _try(store, number, transport)
        if not why:
            checkpoint.damaged = damaged
            return checkpoint
        damaged[number] = why
    return FoundCheckpoint(damaged=damaged)


def step_of(store: StepStore, number: int, transport: Transport) -> FoundCheckpoint:
    """One step; or the same error on every worker."""
    return _whole(*_try(store, number, transport), transport.world)


def single(path: Path, transport: Transport) -> FoundCheckpoint:
    """The checkpoint at a path; or the same error on every worker."""
    checkpoint = FoundCheckpoint(name=str(path), frozen_file=store_for(path.parent).frozen)
    return _whole(checkpoint, _fill(checkpoint, lambda needed: path, transport), transport.world)


def _whole(checkpoint: FoundCheckpoint, why: str, world: World) -> FoundCheckpoint:
    if why:
        raise CheckpointError(world.sign(f"the checkpoint {checkpoint.name} cannot be resumed: {why}"))
    return checkpoint


def _try(store: StepStore, number: int, transport: Transport) -> tuple[FoundCheckpoint, str]:
    """A step, and the workers' errors; "" if it is intact for all."""
    checkpoint = FoundCheckpoint(number, store.name(number), frozen_file=store.frozen)
    return checkpoint, _fill(checkpoint, lambda needed: store.fetch(number, needed), transport)


def _fill(checkpoint: FoundCheckpoint, fetch: Callable[[Needed], Path], transport: Transport) -> str:
    """Read a checkpoint; the workers' errors, or ""."""
    problem, about = "", ""
    try:
        checkpoint.manifest, checkpoint.state = _read(fetch, transport.world)
        files = [checkpoint.manifest["size"], sorted(checkpoint.manifest["files"].items())]
        about = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    except (CheckpointError, OSError) as error:
        problem = str(error)
    answers, world = transport.gather_json([problem, about]), transport.world
    problems = [f"{world.name(rank)}: {one[0]}" for rank, one in enumerate(answers) if one[0]]
    other = [rank for rank, one in enumerate(answers) if one[1] != answers[0][1]]
    if other and not problems:
        problems = [
            f"{world.name(0)} and {world.names(other)} find different checkpoints at {checkpoint.name}; copy one of "
            "them to all hosts"
        ]
    return "; ".join(problems)


def everywhere(store: StepStore, transport: Transport) -> list[int]:
    """The steps that any worker sees, oldest first; or the same error on every worker."""
    problem, numbers = "", list[int]()
    try:
        numbers = store.numbers()
    except (CheckpointError, OSError) as error:
        problem = str(error)
    answers = all_well(transport, problem, f"directory {store.shown} cannot be listed", {"steps": json.dumps(numbers)})
    return sorted({number for one in answers for number in json.loads(one["steps"])})


def _read(fetch: Callable[[Needed], Path], world: World) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A manifest, and this worker's state if as many workers saved it; some worker checks each file."""
    manifest = read_manifest(fetch(lambda manifest: _needed(manifest, world)))
    if manifest["size"] == world.size:
        if world.rank == 0:
            check_files(manifest, [GLOBAL])
        return manifest, read_rank(manifest, world.rank)
    check_files(manifest, all_names(manifest["size"])[world.rank :: world.size])
    return manifest, None


def _needed(manifest: dict[str, Any], world: World) -> list[str]:
    """The files that this worker will read."""
    if manifest["size"] != world.size:
        return all_names(manifest["size"])
    return [*([GLOBAL] if world.rank == 0 else []), *rank_names(world.rank)]


class CheckpointFinder:
    """Finds the checkpoint to resume, the same on all workers; fetched files exist until the end of the `with`.

    Args:
        path: what the user named, or None for the run's own store.
        own: the run's own store, or None.
        transport: the connection.
        start: where to look if the run has no store, or no step in it; or None.
    """

    def __init__(
        self, path: str | Path | None, own: str | Path | None, transport: Transport, start: str | None = None
    ) -> None:
        self._path, self._transport, self._start = path, transport, start
        self._own: StepStore | None = store_for(own) if own is not None else None
        self._stores: list[StepStore] = [] if self._own is None else [self._own]

    def __enter__(self) -> CheckpointFinder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for store in self._stores:
            store.close()

    def found(self) -> FoundCheckpoint:
        """The checkpoint to resume; without a manifest if the run's own store has no step."""
        if self._path is None:
            checkpoint = self._newest(self._own) if self._own is not None else None
            if self._start is not None and (checkpoint is None or not checkpoint.manifest):
                return self._at(self._start)
            if checkpoint is None:
                raise CheckpointError(
                    "resume() was given no path, and attach no checkpoint=; give one of them, such as "
                    'attach(..., checkpoint="checkpoints")'
                )
            return checkpoint
        return self._at(self._path)

    def _at(self, place: str | Path) -> FoundCheckpoint:
        path = local_path(place)
        return self._named(path) if path is not None else self._named_by_url(str(place))

    def _named(self, path: Path) -> FoundCheckpoint:
        """A checkpoint, or the newest of a directory of steps."""
        store = store_for(path)
        disk = runtime.disk()
        alone = disk.is_file(path / MANIFEST) or disk.is_folder(renamed(path)) or is_step(path)
        steps = not alone and disk.is_folder(path) and bool(store.numbers())
        answers = self._transport.gather_json([alone, steps])
        if not any(one[0] for one in answers) and any(one[1] for one in answers):
            return self._newest(store)
        return single(path, self._transport)

    def _named_by_url(self, url: str) -> FoundCheckpoint:
        store = store_for(parent_and_number(url)[0] if is_step(url) else url)
        self._stores.append(store)
        if not is_step(url):
            checkpoint = self._newest(store)
            problem = "" if checkpoint.manifest else f"{shown(url)} has no step in it"
        else:
            checkpoint, problem = step_of(store, parent_and_number(url)[1], self._transport), ""
        all_well(self._transport, problem, f"{shown(url)} cannot be resumed")
        return checkpoint

    def _newest(self, store: StepStore) -> FoundCheckpoint:
        checkpoint = newest(store, self._transport)
        if checkpoint.damaged and not checkpoint.manifest:
            raise CheckpointError(
                self._transport.world.sign(
                    f"none of the {len(checkpoint.damaged)} steps of {store.shown} is whole: "
                    f"{'; '.join(checkpoint.damaged.values())}; put one of "
                    "them right, or move them away for a fresh start"
                )
            )
        return checkpoint

    def own_steps(self, checkpoint: FoundCheckpoint) -> tuple[int, list[int], list[int]]:
        """Of the run's own store: the step that was loaded (-1 if it is from elsewhere), damaged newer steps, and all
        steps; every worker calls it."""
        assert self._own is not None
        there = everywhere(self._own, self._transport)
        for number in there:
            if _same(self._own.name(number), checkpoint.name):
                return number, list(checkpoint.damaged), there
        return -1, [], there


def _same(one: str, other: str) -> bool:
    """Whether two names mean the same path or URL."""
    if not other:
        return False
    mine, its = local_path(one), local_path(other)
    if mine is None or its is None:
        return shown(one) == shown(other)
    return mine.resolve() == its.resolve()


def parent_and_number(url: str) -> tuple[str, int]:
    """The steps' folder and the step's number, of the URL of one step."""
    head, _, last = url.rstrip("/").rpartition("/")
    match = STEP.fullmatch(last)
    if match is None:
        raise CheckpointError(f"{shown(url)} is no step; name the folder of the steps, or one of them")
    return head, int(match[1])
