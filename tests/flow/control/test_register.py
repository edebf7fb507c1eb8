# SPDX-License-Identifier: Apache-2.0
"""The register's laws one by one, where a history would have to be lucky to meet them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.data.ledger.epoch_ledger import ENDLESS, Question
from paceline.errors import GivenUpError, MismatchError, RefusedError
from paceline.flow.control import About, Terms, recovery
from paceline.flow.control.ledger import NOTHING, WORK
from paceline.flow.control.state_machine import RESTORES, Register
from paceline.flow.control.worker_record import Commit

ABOUT = About("host", "127.0.0.1", 1, {"rule": "block"})
MARK = (0, 0, 0, 2)


def begun(workers: int, **terms: Any) -> Register:
    """All of them are members that hold the state."""
    register = Register(Terms(**{"timeout_s": 10.0, "start_s": 1.0, "expected": workers, **terms}))
    for _ in range(workers):
        register.join(ABOUT, 0.0)
    for number in range(workers):
        register.holds_state(number, 1, 0, 0.0)
    register.take()
    return register


def said(register: Register, kind: str) -> list[tuple[int | None, tuple[int, ...], Any]]:
    return [(one.worker, one.numbers, one.note) for one in register.take() if one.kind == kind]


def through(register: Register, worker: int, marks: Any = (), generation: int = 1, exchange: int = 1) -> None:
    register.commit(worker, generation, exchange, Commit(9, list(marks), {}), 0.0)


def again(register: Register, now: float = 0.0) -> Register:
    """A new server, from the record."""
    state = json.loads(json.dumps(recovery.state(register, now)))
    new = Register(register.terms)
    recovery.load(new, state, now)
    return new


def test_who_committed_and_died_counts() -> None:
    register = begun(2)
    register.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    through(register, 0, [MARK])
    register.lost([0], "killed", 0.0)
    assert not said(register, "generation")  # the exchange may still be over at the other
    register.ask(1, 1, Question(0, 0, 4, 2), 0.0)
    assert said(register, "answer") == [(1, (WORK, 0, 0, 2, 4), None)]  # what 0 holds is not free
    through(register, 1)
    assert register.exchange == 1 and register.generation.workers == [1]
    assert said(register, "verdict")[0][1] == (1,)
    assert register.books._ledger.unfinished(0)[0].state() == [[2, 4]]


def test_who_died_behind_its_commit_is_not_waited_for_without_end() -> None:
    register = begun(2)
    through(register, 0)
    register.lost([0], "killed", 0.0)
    for second in range(3):
        register.heard(1, float(second))
        register.tick(float(second))
    assert register.exchange == 0 and register.generation.workers == [1] and register.generation.number == 2


def test_a_commit_sent_again_to_a_new_server_has_the_same_answer() -> None:
    register = begun(2)
    through(register, 0)
    through(register, 1)
    new = again(register)
    for worker in (0, 1):
        recovery.back(new, new.people[worker], 0, 1, [], 0.0)
    through(new, 0)
    assert said(new, "verdict") == [(0, (1,), new.generation.note())]
    with pytest.raises(MismatchError, match="the next one is 2"):
        through(new, 0, exchange=3)


def test_nothing_is_leased_before_all_have_said_what_they_hold() -> None:
    register = begun(2)
    register.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    register.ask(1, 1, Question(0, 0, 4, 2), 0.0)
    new = again(register)
    recovery.back(new, new.people[1], 0, 0, [(0, 0, 2, 4)], 0.0)
    new.ask(1, 2, Question(0, 0, 4, 2, dry=True), 0.0)
    assert said(new, "answer") == [(1, (NOTHING,), None)]
    recovery.back(new, new.people[0], 0, 0, [MARK], 0.0)
    assert {one.kind for one in new.take() if one.worker == 1} >= {"news"}
    new.ask(1, 3, Question(0, 0, 4, 2), 0.0)
    assert said(new, "answer") == [(1, (NOTHING,), None)]
    new.lost([0], "killed", 0.0)
    new.ask(1, 4, Question(0, 0, 4, 2), 0.0)
    assert said(new, "answer") == [(1, (WORK, *MARK), None)]


def test_a_record_that_is_older_than_its_workers_is_no_basis() -> None:
    register = begun(1)
    new = again(register)
    with pytest.raises(GivenUpError, match="holds exchange 3, the record"):
        recovery.back(new, new.people[0], 3, 0, [], 0.0)


def test_only_what_a_worker_holds_can_be_marked() -> None:
    register = begun(2)
    register.ask(0, 1, Question(0, 0, 4, 2), 0.0)
    through(register, 0)
    through(register, 1, [MARK, (0, 0, 2, 4), (0, 7, 0, 1)])
    assert register.exchange == 1 and register.books.strange == 5
    assert register.books._ledger.held(0) == [MARK]


def test_a_server_that_was_away_holds_it_against_nobody() -> None:
    register = begun(2)
    register.forgive(100.0)
    register.tick(100.0)
    assert len(register.members) == 2
    register.tick(102.0)
    assert not register.members


def test_newcomers_among_those_who_wait_at_an_exchange_are_called() -> None:
    register = begun(2, min_workers=2)
    through(register, 0)
    through(register, 1)
    register.starts(0, 2, 0.0)
    register.lost([1], "killed", 0.0)
    register.take()
    register.join(ABOUT, 0.0)
    assert (register.generation.workers, register.generation.donor) == ([0, 2], 0)
    assert [worker for worker, *_ in said(register, "called")] == [2, None]  # and the log hears of it


def test_resumed_workers_must_have_the_same_left_to_do() -> None:
    register = begun(2)
    register.tell(0, 1, "expect", [0, 1, [[2, 4]]], 0.0)
    register.tell(1, 1, "expect", [0, 1, [[2, 4]]], 0.0)
    assert not said(register, "wrong")
    register.tell(1, 2, "expect", [0, 1, [[0, 4]]], 0.0)
    assert "one checkpoint" in said(register, "wrong")[0][2]
    register.tell(0, 1, "expect", [0, 9, [[0, 9]]], 0.0)  # sent again: it is not carried out again
    assert len(said(register, "ack")) == 1


def test_who_is_to_save_while_the_run_waits_hears_first_that_the_exchange_counts() -> None:
    register = begun(2, min_workers=2)
    through(register, 0)
    register.lost([0], "killed", 0.0)
    through(register, 1)
    assert [one.kind for one in register.take() if one.worker == 1] == ["verdict", "paused"]
    register.ledger(1, 10)
    assert said(register, "books")[0][:2] == (1, (1,))


@pytest.mark.parametrize("further", [False, True])
def test_a_run_that_is_lost_again_and_again_behind_one_checkpoint_is_given_up(further: bool) -> None:
    register = begun(1)
    through(register, 0)
    for turn in range(RESTORES + 1):
        register.lost([turn], "killed", 0.0)
        register.join(ABOUT, 0.0)
        assert register.generation.restored and not register.ended
        register.holds_state(turn + 1, register.generation.number, turn if further else 0, 0.0)
        if turn == 3:
            register = again(register)
            recovery.back(register, register.people[turn + 1], register.exchange, 0, [], 0.0)
    assert bool(register.ended) != further
    if not further:
        assert "10 times in a row all workers were lost before another checkpoint" in register.ended
        with pytest.raises(RefusedError, match="10 times in a row"):
            register.join(ABOUT, 0.0)


def test_only_who_is_in_an_epoch_can_say_where_it_ends() -> None:
    register = begun(2)
    endless = Question(0, 0, ENDLESS, 2)
    register.ask(0, 1, endless, 0.0)
    register.ask(1, 1, Question(0, 1, ENDLESS, 2), 0.0)  # nothing of epoch 1 is begun by worker 0
    register.take()
    for serial, (worker, epoch, total) in enumerate(((0, 7, 0), (0, 1, 0)), start=9):
        register.tell(worker, serial, "ends", [0, epoch, total], 0.0)
        (wrong,) = said(register, "wrong")
        assert wrong[0] == worker and f"epoch {epoch} of loader 0 ends after {total} places" in wrong[2]
    through(register, 0, [MARK])
    through(register, 1)
    register.ask(0, 2, endless, 0.0)
    register.take()
    register.tell(0, 30, "ends", [0, 0, 1], 0.0)
    assert "is done up to place 2" in said(register, "wrong")[0][2]
    register.tell(0, 31, "ends", [0, 0, 4], 0.0)
    register.tell(1, 31, "ends", [0, 0, 4], 0.0)
    assert not said(register, "wrong")
