# SPDX-License-Identifier: Apache-2.0
"""The file of the control plane's record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from devtools.world.process import World

from paceline.errors import CheckpointError
from paceline.flow.control import recovery

STATE = {"exchange": 12, "gone": [[3, "it was silent for 0.8 s"]], "waited": 0.125, "books": {"saved": {"a": [1, 2]}}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert recovery.read(path) is None
    recovery.write(path, recovery.encode(STATE))
    assert recovery.read(path) == STATE
    assert path.stat().st_mode & 0o077 == 0, "it holds the workers' secrets"
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]


def test_a_record_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"format": "paceline control 1", **STATE}))
    assert recovery.read(path) == STATE


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    recovery.write(path, recovery.encode(STATE))
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(data))
        with pytest.raises(CheckpointError):
            recovery.read(path)


def test_what_was_read_stays_if_power_fails() -> None:
    """The writer is killed before it has synced the folder; the reader tells others what it has read."""
    path, newer = Path("/record"), {**STATE, "exchange": 13}
    for seed in range(20):
        world = World(seed)
        machine = world.machine("a")
        found: list[object] = []

        def run(program: Callable[[], object], fault: bool = False) -> None:
            process = machine.start(program, "control")  # noqa: B023
            if fault:
                machine.disk.armed = (4, process.kill)  # noqa: B023  # after the write, its sync and the rename
            world.run(lambda: process.dead, 10.0)  # noqa: B023

        run(lambda: recovery.write(path, recovery.encode(STATE)))
        run(lambda: recovery.write(path, recovery.encode(newer)), fault=True)
        for _ in range(2):
            run(lambda: found.append(recovery.read(path)))  # noqa: B023
            machine.fail()
        world.close()
        assert found == [newer, newer]
