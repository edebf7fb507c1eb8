# SPDX-License-Identifier: Apache-2.0
"""What keeps a run of a thousand members cheap: short verdicts, a short record, no message for each of them."""

from __future__ import annotations

import json
from collections import Counter

from paceline.data.ledger.epoch_ledger import Question
from paceline.flow.control import recovery
from paceline.flow.control.messages import Generation, Terms
from paceline.flow.control.recovery import MemberState
from paceline.flow.control.state_machine import ADMIT_S, FEW, StateMachine
from tests.flow.control.test_state_machine import ABOUT, MARK, begun, through

QUESTION = Question(0, 0, 40, 2)


def test_a_verdict_has_no_member_list_unless_the_members_have_changed() -> None:
    machine = begun(2)
    mine = machine.generation
    through(machine, 0)
    through(machine, 1)
    verdicts = [one for one in machine.outbox.take() if one.kind == "verdict"]
    assert [one.note for one in verdicts] == [None, None]
    assert {mine.committed(*one.numbers[1:]) for one in verdicts} == {machine.generation}
    machine.join(ABOUT, 0.0)
    through(machine, 0, exchange=2)
    through(machine, 1, exchange=2)
    verdicts = [one for one in machine.outbox.take() if one.kind == "verdict"]
    assert [Generation.read(one.note).workers for one in verdicts] == [[0, 1, 2]] * 2
    assert verdicts[0].note is verdicts[1].note, "it is encoded once for all"


def test_speeds_are_those_of_the_workers_that_trained() -> None:
    machine = begun(2)
    for now in (1.0, 2.0):
        for worker in (0, 1):
            machine.ask(worker, int(now), QUESTION, now)
    through(machine, 0, [MARK, (0, 0, 4, 6)])
    through(machine, 1, [(0, 0, 2, 4)])
    speeds = machine.ledger._ledger.speeds
    assert [speeds.share(0, worker, 3.0) for worker in (0, 1)] == [2 / 3, 1 / 3]


def test_the_record_is_as_long_with_leases_as_without() -> None:
    machine = begun(3)
    for worker in range(3):
        machine.ask(worker, 1, QUESTION, 0.0)
    books = recovery.state(machine)["books"]["ledger"]
    assert books["books"][0]["free"] == [[0, 40]] and not books["books"][0]["leased"] and not books["speeds"]


def test_a_record_of_an_earlier_version_with_leases_and_speeds_is_read() -> None:
    machine = begun(2)
    for worker in (0, 1):
        machine.ask(worker, 1, QUESTION, 1.0)
    through(machine, 0, [MARK])
    through(machine, 1)
    state = recovery.state(machine)
    full = machine.ledger._ledger.state(3.0)
    assert full["books"][0]["leased"] == [[1, [[2, 4]]]] and full["speeds"]
    found = []
    for ledger in (state["books"]["ledger"], full):
        new = StateMachine(machine.terms)
        recovery.load(new, json.loads(json.dumps({**state, "books": {**state["books"], "ledger": ledger}})), 5.0)
        for worker, marks in ((0, []), (1, [(0, 0, 2, 4)])):
            recovery.back(new, new.workers[worker], MemberState(1, 1, 1), marks, 5.0)
        new.ask(0, 2, QUESTION, 6.0)
        found.append((recovery.state(new)["books"], new.ledger._ledger.held(0), new.ledger._ledger.held(1)))
    assert found[0][1:] == found[1][1:] == ([(0, 0, 4, 6)], [(0, 0, 2, 4)])
    assert found[0][0]["ledger"]["books"] == found[1][0]["ledger"]["books"]


def test_members_are_asked_once_whether_they_live_however_many_complain() -> None:
    machine = begun(4)
    for worker in range(3):
        machine.failed(worker, 1, 1, "reset by peer", [3], 1.0)
    assert Counter(one.worker for one in machine.outbox.take() if one.kind == "check") == dict.fromkeys(range(4), 1)
    assert machine.generation.number == 1
    machine.sign_of_life(3, 1.0)
    assert machine.generation.number == 1, "it may have been sent before the complaint"
    machine.sign_of_life(3, 1.5)
    assert machine.generation.number == 2


def test_many_workers_that_join_before_the_first_commit_do_not_make_a_generation_each() -> None:
    """Every one is told to all members: a thousand would be told half a million times."""
    machine = StateMachine(Terms())
    for _ in range(300):
        machine.join(ABOUT, 0.0)
    assert len(machine.generation.members) == machine.generation.number == FEW + 1, "a few become members at once"
    machine.tick(1.0)
    assert len(machine.generation.members) == 300 and machine.generation.number == FEW + 2
    machine.join(ABOUT, 1.1)
    machine.tick(1.2)
    assert len(machine.generation.members) == 300
    machine.tick(1.0 + ADMIT_S * 300)
    assert len(machine.generation.members) == 301
