# SPDX-License-Identifier: Apache-2.0
"""When a worker says that it holds the state of the run, among members that change meanwhile; without processes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.communication.base import SoloTransport
from paceline.core.world import World
from paceline.errors import CheckpointError, PeerLostError
from paceline.flow import joining
from paceline.flow.commit import ControlLedgerClient
from paceline.flow.control.messages import Generation, WorkerAddress
from paceline.flow.joining import Joining


def generation(number: int, restored: bool = False, donor: int | None = None) -> Generation:
    """Of this worker, 1, and another one; nobody but a donor holds the state."""
    members = tuple(WorkerAddress(worker, "host", "127.0.0.1", 1) for worker in (0, 1))
    new = frozenset({0, 1} - {donor})
    return Generation(number, members, 7 if restored or donor is not None else 0, new, donor)


class Member:
    """The way to a control plane that makes a new generation when it is asked about the ledger."""

    worker = 1

    def __init__(self, first: Generation) -> None:
        self.generation, self.said = first, list[int]()
        self.coming: list[Generation] = []

    def holds_state(self, number: int, exchanges: int, wanted: int) -> None:
        self.said.append(number)

    def ledger(self) -> tuple[int, dict[str, Any]]:
        if self.coming:
            self.generation = self.coming.pop(0)
        return 0, {}


class ElasticMembership:
    """A membership; see :class:`paceline.flow.membership.ElasticMembership`."""

    def __init__(self, first: Generation) -> None:
        self.control, self.generation, self.applied = Member(first), first, -1
        self.transport = SoloTransport(World())
        self.next: Generation | None = None

    @property
    def new(self) -> bool:
        return 1 in self.generation.newcomers

    @property
    def outdated(self) -> bool:
        return self.control.generation.number > self.generation.number

    def rank_of(self, worker: int) -> int:
        return worker

    def renew(self, new: Generation) -> None:
        self.generation = self.control.generation = new

    def follow_control(self) -> None:
        if self.outdated:
            self.renew(self.control.generation)

    def failed(self, error: PeerLostError) -> Generation:
        assert self.next is not None
        return self.next


def begun(first: Generation, monkeypatch: pytest.MonkeyPatch) -> tuple[Joining, ElasticMembership, list[Any]]:
    """A worker that has attached; what it has taken over from others is written into the list."""
    live, taken = ElasticMembership(first), list[Any]()
    monkeypatch.setattr(joining, "receive_state", lambda transport, source, limit: f"state of worker {source}")
    one = Joining(live, [], [])  # type: ignore[arg-type]
    one.put = taken.append
    one.start()
    one.take_given()
    return one, live, taken


def fails_once(live: ElasticMembership, then: Generation, found: bool) -> Callable[[], bool]:
    """A resume in which another member is lost at first."""
    calls: list[int] = []

    def resume() -> bool:
        calls.append(1)
        if len(calls) == 1:
            live.next = then
            raise PeerLostError("worker 0 was lost")
        return found

    return resume


@pytest.mark.parametrize("restored", [False, True])
def test_no_worker_reports_the_state_before_it_has_resumed(restored: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    one, live, _ = begun(generation(1, restored), monkeypatch)
    assert not live.control.said and not one.settled

    def resume() -> bool:
        assert not live.control.said
        return True

    assert one.resume(resume)
    assert live.control.said == [1] and one.settled and not one.must_resume
    assert live.applied == live.generation.exchange


def test_if_all_holders_are_lost_training_needs_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    one, live, _ = begun(generation(2, restored=True), monkeypatch)
    with pytest.raises(CheckpointError, match=r"call run\.resume\(\) before the training loop"):
        one.ready()
    assert not live.control.said


def test_a_joining_worker_holds_the_donors_state(monkeypatch: pytest.MonkeyPatch) -> None:
    one, live, taken = begun(generation(3, donor=0), monkeypatch)
    assert taken == ["state of worker 0"] and live.control.said == [3]

    def never() -> bool:
        raise AssertionError("there is nothing to resume")

    assert one.resume(never)


def test_a_resume_in_which_a_member_is_lost_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    one, live, taken = begun(generation(1, restored=True), monkeypatch)
    assert one.resume(fails_once(live, generation(2, restored=True), True))
    assert live.control.said == [2] and not taken


def test_a_run_that_begins_anew_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    one, live, _ = begun(generation(2, restored=True), monkeypatch)
    assert not one.resume(lambda: False)
    assert "the training begins anew" in caplog.text and live.control.said == [2]


def test_a_checkpoint_has_the_ledger_of_its_own_exchange_or_is_not_taken() -> None:
    leases = ControlLedgerClient(SimpleNamespace(ledger=lambda: (5, {"books": []})), lambda: None, lambda: 4)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match="the ledger is that of exchange 5, and the model that of exchange 4"):
        leases.state()
