# SPDX-License-Identifier: Apache-2.0
"""Reads a checkpoint, the same on all workers: a named one, or the newest intact one of several."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.checkpoint.agreement import all_well
from paceline.checkpoint.files import GLOBAL, all_names, check_files, rank_names, read_manifest, read_rank
from paceline.checkpoint.frozen import Read, reader
from paceline.checkpoint.store import StepStore
from paceline.communication import Transport
from paceline.core.world import World
from paceline.errors import CheckpointError


def look(path: Path, transport: Transport) -> dict[str, Any]:
    """The manifest of a checkpoint by any number of workers; or the same error on every worker."""
    problem, manifest, about = "", {}, ""
    try:
        manifest = read_manifest(path)
        about = _digest(manifest)
    except CheckpointError as error:
        problem = str(error)
    answers = all_well(transport, problem, f"{path} cannot be resumed", {"about": about})
    other = _others(answers)
    if other:
        raise CheckpointError(transport.world.sign(_differ(transport.world, other, str(path))))
    return manifest


def load(manifest: dict[str, Any], path: Path, transport: Transport) -> dict[str, Any]:
    """This worker's state in a checkpoint by as many workers; or the same error on every worker."""
    problem, state = "", {}
    try:
        state = read_rank(manifest, transport.world.rank)
    except CheckpointError as error:
        problem = str(error)
    all_well(transport, problem, f"{path} cannot be resumed")
    return state


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps([manifest["size"], sorted(manifest["files"].items())]).encode()).hexdigest()


def _others(answers: list[Any]) -> list[int]:
    return [rank for rank, one in enumerate(answers) if one != answers[0]]


def _differ(world: World, other: list[int], where: str) -> str:
    return (
        f"{world.name(0)} and {world.names(other)} find different checkpoints at {where}; copy one of them to all hosts"
    )


# -- the newest of several ---------------------------------------------------------------------------------------------


@dataclass
class FoundCheckpoint:
    """A checkpoint that is intact on all workers.

    Attributes:
        number: of the step; -1 if there is none.
        name: for messages.
        manifest: of the checkpoint.
        state: this worker's, if as many workers saved it; else None.
        damaged: number -> error, of newer steps that are damaged.
        frozen_file: gives the file of a frozen tensor's values.
    """

    number: int = -1
    name: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None
    damaged: dict[int, str] = field(default_factory=dict)
    frozen_file: Callable[[str], Path] = Path

    @property
    def read_frozen(self) -> Read:
        """Reads the values of frozen tensors."""
        return reader(self.manifest, self.frozen_file)


def newest(store: StepStore, transport: Transport) -> FoundCheckpoint:
    """The newest step that is intact for all workers; every worker calls it and gets the same one.

    Raises:
        CheckpointError: the steps cannot be listed, on every worker alike.
    """
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
    checkpoint, why = _try(store, number, transport)
    if why:
        raise CheckpointError(transport.world.sign(f"the checkpoint {store.name(number)} cannot be resumed: {why}"))
    return checkpoint


def _try(store: StepStore, number: int, transport: Transport) -> tuple[FoundCheckpoint, str]:
    """A step, and the workers' errors; "" if it is intact for all."""
    problem, about, checkpoint = "", "", FoundCheckpoint(number, store.name(number), frozen_file=store.frozen)
    try:
        checkpoint.manifest, checkpoint.state = _read(store, number, transport.world)
        about = _digest(checkpoint.manifest)
    except (CheckpointError, OSError) as error:
        problem = str(error)
    return checkpoint, _said(transport, problem, about, checkpoint.name)


def everywhere(store: StepStore, transport: Transport) -> list[int]:
    """The steps that any worker sees, oldest first; or the same error on every worker."""
    problem, numbers = "", list[int]()
    try:
        numbers = store.numbers()
    except (CheckpointError, OSError) as error:
        problem = str(error)
    answers = all_well(transport, problem, f"directory {store.shown} cannot be listed", {"steps": json.dumps(numbers)})
    return sorted({number for one in answers for number in json.loads(one["steps"])})


def _said(transport: Transport, problem: str, about: str, where: str) -> str:
    """The workers' errors about a step; "" if it is intact for all."""
    answers, world = transport.gather_json({"problem": problem, "about": about}), transport.world
    problems = [f"{world.name(rank)}: {one['problem']}" for rank, one in enumerate(answers) if one["problem"]]
    other = _others([one["about"] for one in answers])
    if other and not problems:
        problems = [_differ(world, other, where)]
    return "; ".join(problems)


def _read(store: StepStore, number: int, world: World) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """A step's manifest, and this worker's state if as many workers saved it; some worker checks each file."""
    manifest = read_manifest(store.fetch(number, lambda manifest: _needed(manifest, world)))
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
