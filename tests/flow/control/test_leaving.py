# SPDX-License-Identifier: Apache-2.0
"""A worker leaves before the end of its program: what the control plane does."""

from __future__ import annotations

from paceline.data.ledger.epoch_ledger import Question
from paceline.flow.control.ledger import WORK
from tests.flow.control.test_state_machine import ABOUT, MARK, begun, said, through


def test_the_others_go_on_without_it_and_with_its_leases() -> None:
    machine = begun(2)
    machine.ask(0, 1, Question(0, 0, 2, 2), 0.0)
    machine.leave(0, False, 0.0)
    assert machine.generation.workers == [1] and not machine.finished
    machine.ask(1, 1, Question(0, 0, 2, 2), 0.0)
    sent = machine.outbox.take()
    assert [one.numbers for one in sent if one.kind == "answer" and one.worker == 1] == [(WORK, *MARK)]
    assert [one.worker for one in sent if one.kind == "farewell"] == [0]


def test_it_calls_all_others_to_its_last_exchange_and_to_no_further_one() -> None:
    machine = begun(3)
    machine.starts(0, 1, 0.0)
    assert not said(machine, "called")
    machine.starts(1, 1, 0.0, leaves=True)
    assert [worker for worker, *_ in said(machine, "called") if worker is not None] == [2]
    for worker in range(3):
        through(machine, worker)
    machine.leave(1, False, 0.0)
    machine.outbox.take()
    machine.starts(0, 2, 0.0)
    assert not said(machine, "called")


def test_the_last_that_holds_the_state_is_told_so() -> None:
    machine = begun(1)
    machine.leave(0, False, 0.0)
    assert said(machine, "alone") == [(0, (0,), None)] and machine.generation.workers == [0] and 0 in machine.workers
    machine.join(ABOUT, 0.0)
    machine.leave(0, False, 0.0)
    assert said(machine, "alone") == [(0, (1,), None)]  # the new one does not hold it yet
    machine.leave(0, True, 0.0)
    assert 0 not in machine.workers and machine.generation.workers == [1] and machine.generation.donor is None
