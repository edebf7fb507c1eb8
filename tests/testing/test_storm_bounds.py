# SPDX-License-Identifier: Apache-2.0
"""What an elastic run holds does not grow with the number of workers that have died and come."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

import pytest
from devtools.storm.control import ControlStorm
from devtools.storm.elastic import RECORD, StormSettings
from devtools.world.process import Process

from paceline.flow.control import state_machine

EVERY_S = 5.0
"""Seconds from one death to the next: longer than a replacement needs to become a member."""
REMEMBERED = 4


class Deaths(ControlStorm):
    """Three workers; of the living ones one is killed after the other, and replaced."""

    deaths = 0

    def prepare(self) -> None:
        super().prepare()
        self.job = type(self.job)(**{**vars(self.job), "samples": 1 << 20})

    def arrive(self) -> None:
        for _ in range(3):
            self.join()
        self.world.after(EVERY_S, self.kill)

    def kill(self) -> None:
        living: list[Process] = [one for one in self.workers.values() if not one.dead]
        living[self.deaths % len(living)].kill()
        self.deaths += 1
        self.world.after(EVERY_S, self.kill)


def items(thing: Any, seen: set[int]) -> int:
    """Entries of all containers that belong to a control plane, and of their containers."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, Mapping):
        return len(thing) + sum(items(one, seen) for pair in thing.items() for one in pair)
    if isinstance(thing, (list, tuple, Set)):
        return len(thing) + sum(items(one, seen) for one in thing)
    if type(thing).__module__.startswith(("paceline.flow", "paceline.data")) and hasattr(thing, "__dict__"):
        return items(vars(thing), seen)
    return 0


def held(storm: Deaths) -> dict[str, int]:
    """How much of everything there is."""
    server, world = storm.server, storm.world
    assert server is not None
    return {
        "tables": items(server._machine, set()),
        "connections": len(server._connections) + len(server._heartbeats) + len(server._unidentified),
        "channels": len(world.network.channels),
        "files": len(storm.control_machine.disk.files()),
        "record": len(storm.control_machine.disk.content(RECORD) or b""),
        "members": len(storm.workers),
    }


def test_what_a_run_holds_does_not_grow_with_deaths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_machine, "REMEMBERED", REMEMBERED)
    storm = Deaths(3, StormSettings("control"))
    found: list[dict[str, int]] = []
    for deaths in range(8, 13), range(18, 23):
        most: dict[str, int] = {}
        for number in deaths:
            assert storm.world.run(lambda number=number: storm.deaths >= number, 1e4)
            most = {name: max(most.get(name, 0), size) for name, size in held(storm).items()}
        found.append(most)
    storm.world.close()
    assert storm.problems == [] and storm.server is not None
    early, late = found
    assert all(late[name] <= 1.05 * early[name] for name in early), found
