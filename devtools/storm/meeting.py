# SPDX-License-Identifier: Apache-2.0
"""Exchanges among simulated members: each ends at every member for itself, with the sum or with an error.

It stands for a ring where only the control plane is under test: what a member contributes comes to all others or not,
one after another, and a member that dies takes what it has not sent with it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from devtools.world.process import Process, World
from devtools.world.scheduler import SimThread

from paceline.errors import PeerLostError
from paceline.flow.control.messages import Generation

Model = Counter[tuple[int, int]]
"""How often each sample, an epoch and a place, is in a model."""
DETECT_S = 0.05
"""Seconds until a member knows that another one has died."""


@dataclass
class _Meeting:
    """One exchange of one generation."""

    generation: int
    members: tuple[int, ...]
    contributions: dict[int, Model] = field(default_factory=dict)
    waiting: dict[int, SimThread] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    results: dict[int, Model] = field(default_factory=dict)
    failed: dict[int, tuple[str, list[int]]] = field(default_factory=dict)


class Meetings:
    """All exchanges of a world.

    Args:
        world: of the members.
        wire_s: seconds that an exchange takes once all have come, beside the latency of frames.
    """

    def __init__(self, world: World, wire_s: float = 0.0) -> None:
        self.world, self._wire_s = world, wire_s
        self._meetings: dict[tuple[str, int], _Meeting] = {}
        self._cancelled: dict[int, tuple[int, str]] = {}  # by worker: the last generation that is over, and why
        self.states: dict[int, tuple[Process, str, tuple[Model, str]]] = {}  # by worker: label, model, lineage

    def exchange(self, generation: Generation, exchange: int, worker: int, own: Model, limit_s: float) -> Model:
        """The sum of all members' contributions; PeerLostError if it does not come."""
        world = self.world
        first = _Meeting(generation.number, tuple(generation.workers))
        meeting = self._meetings.setdefault((generation.label, exchange), first)
        me = world.current
        process = me.owner
        assert isinstance(process, Process)
        meeting.contributions[worker], meeting.waiting[worker], meeting.processes[worker] = own, me, process
        process.on_end.append(lambda: self._died(meeting, worker))
        if len(meeting.contributions) == len(meeting.members):
            total = sum(meeting.contributions.values(), Model())
            for one in meeting.members:
                world.after(self._wire_s + world.network.latency(), lambda one=one: self._arrived(meeting, one, total))  # type: ignore[misc]
        over, why = self._cancelled.get(worker, (0, ""))
        if generation.number <= over:  # it was told so while it trained
            self._fail(meeting, worker, why, [])
        until = world.now + limit_s
        while worker not in meeting.results:
            if worker in meeting.failed:
                why, _ = meeting.failed[worker]
                raise PeerLostError(why)
            if not world.park(until):
                missing = [one for one in meeting.members if one not in meeting.contributions]
                meeting.failed[worker] = f"workers {missing} did not come", missing
        return meeting.results[worker]

    def suspects(self, generation: Generation, exchange: int, worker: int) -> list[int]:
        """Whom a member blames for a failed exchange."""
        return self._meetings[generation.label, exchange].failed.get(worker, ("", []))[1]

    def cancel(self, generation: int, worker: int, why: str) -> None:
        """A member is told that older generations are over."""
        self._cancelled[worker] = generation, why
        for meeting in self._meetings.values():
            if meeting.generation <= generation and worker in meeting.waiting and worker not in meeting.results:
                self._fail(meeting, worker, why, [])

    def _arrived(self, meeting: _Meeting, worker: int, total: Model) -> None:
        if worker in meeting.failed:
            return
        cut = any(not self._reach(meeting, worker, other) for other in meeting.members if other != worker)
        if cut:  # its ring waits until a deadline
            return
        meeting.results[worker] = Model(total)
        self.world.wake(meeting.waiting[worker])

    def _reach(self, meeting: _Meeting, one: int, other: int) -> bool:
        here, there = meeting.processes[one].machine.address, meeting.processes[other].machine.address
        return self.world.network.reachable(here, there)

    def _died(self, meeting: _Meeting, worker: int) -> None:
        for other in meeting.members:
            if other != worker and other not in meeting.results:
                rest = DETECT_S * self.world.rng.random()
                self.world.after(rest, lambda other=other: self._fail(meeting, other, "it has died", [worker]))  # type: ignore[misc]

    def _fail(self, meeting: _Meeting, worker: int, why: str, blamed: list[int]) -> None:
        if worker not in meeting.results and worker not in meeting.failed:
            meeting.failed[worker] = why, blamed
            if worker in meeting.waiting:
                self.world.wake(meeting.waiting[worker])
