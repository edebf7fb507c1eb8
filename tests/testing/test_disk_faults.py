# SPDX-License-Identifier: Apache-2.0
"""Checkpoints on simulated disks: power that fails at any operation, disks that are full, fail, or flip bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from devtools.world import Process, SimMachine, World

from paceline.checkpoint.claim import DirectoryClaim
from paceline.checkpoint.files import Content, read_manifest, read_rank, without_beats
from paceline.checkpoint.saving import write
from paceline.checkpoint.store import DirectoryStore
from paceline.communication import SoloTransport
from paceline.errors import CheckpointError

PLACE = Path("/runs/steps")


def ends(machine: SimMachine, program: Callable[[], object]) -> Process:
    """Run a program to its end, or to its death."""
    process = machine.start(program, "program")
    assert machine.world.run(lambda: process.dead and not process.threads, 1000.0)
    if process.error is not None:
        raise process.error
    return process


def save(path: Path, value: float) -> None:
    content = Content({"value": value}, {"t": torch.full((5,), value)}, {"w": torch.full((3,), value)})
    write(path, SoloTransport(), {"rule": "none", "minibatches": 1}, lambda: content, without_beats)


def value_at(path: Path) -> float:
    """What a whole checkpoint holds; CheckpointError if it is none."""
    return float(read_rank(read_manifest(path), 0)["value"])


def at_each_operation(
    seeds: int, before: Callable[[], object], call: Callable[[], object], power: bool = True
) -> list[tuple[bool, World]]:
    """Whether `call` was over, and the world, after a power failure, or a kill, at each operation on the disk."""
    found = []
    for seed in range(seeds):
        operation, over = 0, False
        while not over:
            operation += 1
            world = World(1000 * seed + operation)
            machine, done = world.machine("a"), list[int]()
            ends(machine, before)
            machine.disk.armed = (operation, machine.fail if power else lambda: next(iter(machine.processes)).kill())  # noqa: B023

            def program() -> None:
                call()
                done.append(1)  # noqa: B023

            ends(machine, program)
            over = bool(done)
            machine.disk.armed = None
            if over and power:
                machine.fail()
            found.append((over, world))
    return found


def seen(world: World, path: Path) -> float:
    values: list[float] = []
    ends(next(iter(world.machines.values())), lambda: values.append(value_at(path)))
    return values[0]


def test_a_new_step_is_whole_or_not_there_whenever_power_fails() -> None:
    """Also its folder and its parents are new."""

    def first() -> None:
        DirectoryClaim(PLACE, "run").take()
        save(PLACE / "step-000000001", 1.0)

    path = PLACE / "step-000000001"
    for over, world in at_each_operation(6, lambda: None, first):
        if over:
            assert seen(world, path) == 1.0
        else:
            try:
                assert seen(world, path) == 1.0
            except CheckpointError as error:
                assert "is no checkpoint: it has no manifest" in str(error)


def test_what_replaces_a_checkpoint_is_the_old_one_or_the_new_one_whenever_power_fails() -> None:
    path, values = PLACE / "saved", set()
    for over, world in at_each_operation(4, lambda: save(path, 1.0), lambda: save(path, 2.0)):
        value = seen(world, path)
        assert value == 2.0 if over else value in (1.0, 2.0)
        values.add(value)
    assert values == {1.0, 2.0}


@pytest.mark.parametrize("power", [True, False])
def test_a_step_that_was_half_removed_is_removed_by_the_next_process(power: bool) -> None:
    def three() -> None:
        for number in (1, 2, 3):
            save(PLACE / f"step-00000000{number}", float(number))

    for _, world in at_each_operation(2, three, lambda: DirectoryStore(PLACE).tidy(1), power):
        machine = next(iter(world.machines.values()))
        ends(machine, lambda: DirectoryStore(PLACE).tidy(1))
        assert {file.parent.name for file in machine.disk.files(PLACE)} == {"step-000000003"}
        world.close()


def test_a_file_that_cannot_be_synced_fails_the_step() -> None:
    """The disk has lost it: it must not be taken for whole because it can be read until power fails."""
    path = PLACE / "saved"
    for nth in range(1, 5):  # three files, and the manifest
        world = World(nth)
        machine = world.machine("a")
        ends(machine, lambda: save(path, 1.0))
        machine.disk.failing["sync"] = 1
        machine.disk.failing_after["sync"] = nth - 1
        with pytest.raises(CheckpointError, match="input/output error"):
            ends(machine, lambda: save(path, 2.0))
        machine.fail()
        assert seen(world, path) == 1.0
        world.close()


@pytest.mark.parametrize("nth", [0, 1, 2, 3, 4])
def test_a_file_that_cannot_be_read_is_a_damaged_checkpoint(nth: int) -> None:
    """Not an error that only this worker knows, while the others wait for it."""
    world = World(nth)
    machine, path = world.machine("a"), PLACE / "saved"
    ends(machine, lambda: save(path, 1.0))
    machine.disk.failing["read"], machine.disk.failing_after["read"] = 1, nth
    with pytest.raises(CheckpointError, match=r"cannot be read: .*input/output error"):
        seen(world, path)
    assert seen(world, path) == 1.0
    world.close()
