# SPDX-License-Identifier: Apache-2.0
"""The state machine's laws one by one, where a history would have to be lucky to meet them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.data.ledger.epoch_ledger import Question
from paceline.errors import GivenUpError, MismatchError, RefusedError
from paceline.flow.control import recovery
from paceline.flow.control.ledger import NOTHING, WORK
from paceline.flow.control.members import Commit
from paceline.flow.control.messages import About, Terms
from paceline.flow.control.recovery import MemberState
from paceline.flow.control.state_machine import RESTORES, StateMachine

ABOUT = About("host", "127.0.0.1", 1, {"rule": "block"})
MARK = (0, 0, 0, 2)


def begun(workers: int, **terms: Any) -> StateMachine:
    """All of them are members that hold the state."""
    machine = StateMachine(Terms(**{"timeout_s": 10.0, "start_s": 1.0, "expected": workers, **terms}))
    for _ in range(workers):
        machine.join(ABOUT, 0.0)
    for number in range(workers):
        machine.holds_state(number, 1, 0, 0.0)
    machine.outbox.take()
    return machine


def said(machine: StateMachine, kind: str) -> list[tuple[int | None, tuple[int, ...], Any]]:
    return [(one.worker, one.numbers, one.note) for one in machine.outbox.take() if one.kind == kind]


def through(machine: StateMachine, worker: int, marks: Any = (), generation: int = 1, exchange: int = 1) -> None:
    machine.commit(worker, generation, exchange, Commit(9, list(marks), {}), 0.0)


def again(machine: StateMachine, now: float = 0.0) -> StateMachine:
    """A new server, from the record."""
    state = json.loads(json.dumps(recovery.state(machine)))
    new = StateMachine(machine.terms)
    recovery.load(new, state, now)
    return new


def test_a_worker_that_died_after_its_commit_counts() -> None:
    machine = begun(2)
    machine.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    through(machine, 0, [MARK])
    machine.lost([0], "killed", 0.0)
    assert not said(machine, "generation")  # the exchange may still be over at the other
    machine.ask(1, 1, Question(0, 0, 4, 2), 0.0)
    assert said(machine, "answer") == [(1, (WORK, 0, 0, 2, 4), None)]  # what 0 holds is not free
    through(machine, 1)
    assert machine.exchange == 1 and machine.generation.workers == [1]
    assert said(machine, "verdict") == [(1, (1, 2, 1, 1, 0), machine.generation.note())]  # the members have changed
    assert machine.ledger._ledger.epochs.unfinished(0)[0].state() == [[2, 4]]


def test_the_wait_after_a_death_and_its_commit_has_a_deadline() -> None:
    machine = begun(2)
    through(machine, 0)
    machine.lost([0], "killed", 0.0)
    for second in range(3):
        machine.sign_of_life(1, float(second))
        machine.tick(float(second))
    assert machine.exchange == 0 and machine.generation.workers == [1] and machine.generation.number == 2


def test_a_commit_sent_again_to_a_new_server_has_the_same_answer() -> None:
    machine = begun(2)
    through(machine, 0)
    through(machine, 1)
    new = again(machine)
    for worker in (0, 1):
        recovery.back(new, new.workers[worker], MemberState(0, 1, new.generation.number), [], 0.0)
    through(new, 0)
    assert said(new, "verdict") == [(0, (1,), new.generation.note())]
    with pytest.raises(MismatchError, match="the next one is 2"):
        through(new, 0, exchange=3)


def test_nothing_is_leased_before_all_have_said_what_they_hold() -> None:
    machine = begun(2)
    machine.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    machine.ask(1, 1, Question(0, 0, 4, 2), 0.0)
    new = again(machine)
    recovery.back(new, new.workers[1], MemberState(0, 0, new.generation.number), [(0, 0, 2, 4)], 0.0)
    new.ask(1, 2, Question(0, 0, 4, 2, dry=True), 0.0)
    assert said(new, "answer") == [(1, (NOTHING,), None)]
    recovery.back(new, new.workers[0], MemberState(0, 0, new.generation.number), [MARK], 0.0)
    assert {one.kind for one in new.outbox.take() if one.worker == 1} >= {"news"}
    new.ask(1, 3, Question(0, 0, 4, 2), 0.0)
    assert said(new, "answer") == [(1, (NOTHING,), None)]
    new.lost([0], "killed", 0.0)
    new.ask(1, 4, Question(0, 0, 4, 2), 0.0)
    assert said(new, "answer") == [(1, (WORK, *MARK), None)]


def test_a_member_that_comes_back_with_a_state_that_the_record_does_not_know_of_keeps_it() -> None:
    """The server was killed while it wrote that; the new one formed a generation in which the member needs the state.

    The member would drop its work, and the server wait for the work on its leases.
    """
    machine = begun(3)
    machine.ask(1, 1, Question(0, 0, 4, 2), 0.0)
    machine.workers[1].holds = False
    new = again(machine)
    new.lost([2], "killed", 0.0)
    assert (new.generation.number, new.generation.newcomers) == (2, {1})
    recovery.back(new, new.workers[1], MemberState(0, 0, 1), [MARK], 0.0)
    assert (new.generation.number, new.generation.newcomers, new.generation.workers) == (3, set(), [0, 1])
    assert new.ledger._ledger.held(1) == [MARK]
    recovery.back(new, new.workers[0], MemberState(0, 0, 1), [], 0.0)
    assert new.generation.number == 3


def test_a_record_that_is_older_than_its_workers_is_no_basis() -> None:
    new = again(begun(1))
    with pytest.raises(GivenUpError, match="holds exchange 3, and the record of"):
        recovery.back(new, new.workers[0], MemberState(3, 0, new.generation.number), [], 0.0)
    with pytest.raises(
        GivenUpError,
        match="knows generation 2, and the record of the control plane, which could not be written, knows 1 only",
    ):
        recovery.back(new, new.workers[0], MemberState(0, 0, 2), [], 0.0)


def test_only_what_a_worker_holds_can_be_marked() -> None:
    machine = begun(2)
    machine.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    through(machine, 0)
    for marks in ([MARK], [(0, 0, 2, 4)], [(0, 7, 0, 1)], [(0, 0, 0, 3)]):
        with pytest.raises(
            MismatchError, match=r"worker 1 commits places \d to \d of epoch . of loader 0, and holds 0"
        ):
            through(machine, 1, marks)
    machine.tell(1, 1, "done", [[list(MARK)]], 0.0)
    assert machine.exchange == 0 and machine.ledger.strange == 2
    assert machine.ledger._ledger.held(0) == [MARK]


def test_places_cannot_be_given_back_while_their_commit_waits() -> None:
    """The work would be in the sums, and another worker would do it again."""
    machine = begun(2)
    machine.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    through(machine, 0, [MARK])
    with pytest.raises(MismatchError, match="tells of places while its commit waits"):
        machine.tell(0, 2, "left", [0, 0, [list(MARK)]], 0.0)
    through(machine, 1)
    assert machine.exchange == 1 and machine.ledger.strange == 0 and machine.ledger._ledger.held(0) == []


def test_one_that_is_told_that_it_is_wrong_and_goes_on_is_put_out() -> None:
    machine = begun(1)
    machine.ask(0, 1, Question(0, 0, 40, 2), 0.0)
    for serial in (2, 3, 4):
        machine.ask(0, serial, Question(0, 0, 41, 2), 0.0)
    with pytest.raises(MismatchError, match=r"was told 3 times that it is wrong, and goes on: workers do not share"):
        machine.ask(0, 5, Question(0, 0, 41, 2), 0.0)


def test_leases_that_a_worker_reports_after_a_restart_may_be_committed() -> None:
    """The record may be older than they are, and another worker may hold them by now: these marks are left out."""
    machine = begun(2)
    machine.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    machine.ask(1, 1, Question(0, 0, 4, 2), 0.0)
    new = again(machine)
    recovery.back(new, new.workers[0], MemberState(0, 0, new.generation.number), [(0, 0, 0, 4)], 0.0)
    recovery.back(new, new.workers[1], MemberState(0, 0, new.generation.number), [(0, 0, 2, 4)], 0.0)
    through(new, 0, [(0, 0, 0, 4)])
    through(new, 1, [(0, 0, 2, 4)])
    assert new.exchange == 1 and new.ledger.strange == 2


def test_a_pause_of_the_server_counts_against_no_worker() -> None:
    machine = begun(2)
    machine.forgive(100.0)
    machine.tick(100.0)
    assert len(machine.members) == 2
    machine.tick(102.0)
    assert not machine.members


def test_joining_workers_are_called_to_an_exchange_at_which_others_wait() -> None:
    machine = begun(2, min_workers=2)
    through(machine, 0)
    through(machine, 1)
    machine.starts(0, 2, 0.0)
    machine.lost([1], "killed", 0.0)
    machine.outbox.take()
    machine.join(ABOUT, 0.0)
    assert (machine.generation.workers, machine.generation.donor) == ([0, 2], 0)
    assert [worker for worker, *_ in said(machine, "called")] == [2, None]  # and the log hears of it


def test_resumed_workers_must_have_the_same_left_to_do() -> None:
    machine = begun(2)
    machine.tell(0, 1, "expect", [0, 1, [[2, 4]]], 0.0)
    machine.tell(1, 1, "expect", [0, 1, [[2, 4]]], 0.0)
    assert not said(machine, "wrong")
    machine.tell(1, 2, "expect", [0, 1, [[0, 4]]], 0.0)
    assert "one checkpoint" in said(machine, "wrong")[0][2]
    machine.tell(0, 1, "expect", [0, 9, [[0, 9]]], 0.0)  # sent again: it is not carried out again
    assert len(said(machine, "ack")) == 1


def test_the_log_counts_the_workers_of_a_run_that_waits_as_they_come() -> None:
    """Else a status would say for hours that nobody is there."""
    machine = StateMachine(Terms(min_workers=3, timeout_s=10.0, start_s=1.0))
    for now in (0.0, 1.0):
        machine.join(ABOUT, now)
        machine.settle(now, "")
    told = [note["reason"].split(" (")[0] for worker, _, note in said(machine, "paused") if worker is None]
    assert told == [f"{there} of at least 3 workers are there" for there in (1, 2)]


@pytest.mark.parametrize("further", [False, True])
def test_a_run_that_restores_one_checkpoint_too_often_is_given_up(further: bool) -> None:
    machine = begun(1)
    through(machine, 0)
    for turn in range(RESTORES + 1):
        machine.lost([turn], "killed", 0.0)
        machine.join(ABOUT, 0.0)
        assert machine.generation.restored and not machine.ended
        machine.holds_state(turn + 1, machine.generation.number, turn if further else 0, 0.0)
        if turn == 3:
            machine = again(machine)
            said_so = MemberState(machine.exchange, 0, machine.generation.number)
            recovery.back(machine, machine.workers[turn + 1], said_so, [], 0.0)
    assert bool(machine.ended) != further
    if not further:
        assert "10 times in a row all workers were lost before another checkpoint" in machine.ended
        with pytest.raises(RefusedError, match="10 times in a row"):
            machine.join(ABOUT, 0.0)
