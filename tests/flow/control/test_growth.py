# SPDX-License-Identifier: Apache-2.0
"""A number of members that grows: who joins when, step by step."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import MismatchError
from paceline.flow.control import recovery
from paceline.flow.control.members import Commit
from paceline.flow.control.messages import About, Terms
from paceline.flow.control.recovery import MemberState
from paceline.flow.control.state_machine import HELD, NOT_WANTED, StateMachine
from tests.flow.control.test_state_machine import again, said

GROWS = About("host", "127.0.0.1", 1, {"rule": "block"}, first=2)


def begun(workers: int, **terms: Any) -> StateMachine:
    """So many have joined, and the first two train."""
    machine = StateMachine(Terms(**{"timeout_s": 10.0, "start_s": 1.0, "expected": workers, **terms}))
    for _ in range(workers):
        machine.join(GROWS, 0.0)
    for number in machine.generation.workers:
        machine.holds_state(number, machine.generation.number, 0, 0.0)
    return machine


def exchange(machine: StateMachine, wanted: int, now: float = 0.0) -> None:
    """All members make the next exchange, and newcomers get the state."""
    number, generation = machine.exchange + 1, machine.generation
    for worker in generation.workers:
        machine.commit(worker, generation.number, number, Commit(number, [], {"effective": 1.75}, [], wanted), now)
    assert machine.exchange == number
    for worker in machine.generation.newcomers:
        machine.holds_state(worker, machine.generation.number, 0, now)


def held(machine: StateMachine) -> list[int]:
    return [one.worker for one in machine.workers.values() if one.held]


def test_the_first_two_begin_at_once_and_the_others_are_told_that_they_wait() -> None:
    machine = begun(4)
    assert machine.generation.workers == [0, 1] and machine.generation.wanted == 2
    assert held(machine) == [2, 3]
    sent = machine.outbox.take()
    assert [(one.worker, one.note) for one in sent if one.kind == "held" and one.worker is not None] == [
        (2, HELD),
        (3, HELD),
    ]
    assert [one.note for one in sent if one.kind == "held" and one.worker is None][-1] == {"workers": 2, "wanted": 2}
    assert machine.status(0.0)["wanted"] == machine.status(0.0)["held"] == 2


def test_members_join_as_they_are_wanted() -> None:
    machine = begun(5)
    exchange(machine, 2)
    assert machine.generation.workers == [0, 1] and machine.generation.number == 1
    machine.outbox.take()
    exchange(machine, 4)
    assert machine.generation.workers == [0, 1, 2, 3] and machine.generation.donor == 0
    assert said(machine, "grown") == [(None, (), {"wanted": 4, "before": 2, "reason": "2 workers were worth 1.75"})]
    assert held(machine) == [4]
    exchange(machine, 8)
    assert machine.generation.workers == [0, 1, 2, 3, 4] and held(machine) == []
    machine.join(GROWS, 0.0)
    exchange(machine, 8)
    assert machine.generation.workers == [0, 1, 2, 3, 4, 5]


def test_the_number_never_falls_and_stays_within_the_bounds_of_the_user() -> None:
    machine = begun(4, max_workers=5)
    exchange(machine, 8)
    assert machine.wanted == 5
    exchange(machine, 2)
    assert machine.wanted == 5 and len(machine.members) == 4


def test_a_waiting_worker_takes_the_place_of_a_lost_one() -> None:
    machine = begun(4)
    exchange(machine, 2)
    machine.lost([1], "killed", 0.0)
    assert machine.generation.workers == [0] and held(machine) == [3]  # at the next commit
    exchange(machine, 2)
    assert machine.generation.workers == [0, 2] and machine.wanted == 2
    machine.lost([0, 2], "killed", 0.0)
    assert machine.generation.workers == [3] and machine.generation.restored


@pytest.mark.parametrize(("reports", "out"), [([2, 4], [1]), ([4, 2, 2], [0]), ([2, 2, 4, 9], [2, 3])])
def test_who_reports_another_number_than_most_is_put_out(reports: list[int], out: list[int]) -> None:
    """Not who comes later: the first may be the one that lies. What it has committed is in the sums, and counts."""
    machine = StateMachine(Terms(max_workers=8, timeout_s=10.0, start_s=1.0, expected=len(reports)))
    for _ in reports:
        machine.join(About("host", "127.0.0.1", 1, {}, len(reports)), 0.0)
    for worker in range(len(reports)):
        machine.holds_state(worker, 1, 0, 0.0)
    for worker, wanted in enumerate(reports):
        machine.commit(worker, 1, 1, Commit(1, [], {}, [], wanted), 0.0)
    assert sorted(machine.gone) == out and machine.exchange == 1
    assert all("it reports that" in why and "report" in why for why in machine.gone.values())
    assert machine.wanted == max(len(reports), 2)


def test_where_the_number_does_not_grow_none_is_wanted() -> None:
    machine = StateMachine(Terms(timeout_s=10.0, expected=1))
    machine.join(About("host", "127.0.0.1", 1, {}), 0.0)
    machine.holds_state(0, 1, 0, 0.0)
    with pytest.raises(MismatchError, match="the number of this run's workers does not grow"):
        machine.commit(0, 1, 1, Commit(1, [], {}, [], 4), 0.0)


def test_a_restarted_server_knows_the_number_and_tells_those_who_wait() -> None:
    machine = begun(6)
    exchange(machine, 4)
    new = again(machine)
    assert new.wanted == 4
    for worker in range(6):
        state = MemberState(1 if worker < 4 else -1, 0, new.generation.number)
        recovery.back(new, new.workers[worker], state, [], 0.0)
    told = [(worker, note) for worker, _, note in said(new, "held") if worker is not None]
    assert told[-2:] == [(4, HELD), (5, HELD)]
    exchange(new, 4)
    assert new.generation.workers == [0, 1, 2, 3]
    exchange(new, 8)
    assert new.generation.workers == [0, 1, 2, 3, 4, 5]


def test_a_checkpoint_brings_its_number_as_soon_as_all_members_hold_it() -> None:
    machine = StateMachine(Terms(timeout_s=10.0, start_s=1.0, expected=6))
    for _ in range(6):
        machine.join(GROWS, 0.0)
    machine.holds_state(0, 1, 7, 0.0, wanted=4)
    assert machine.wanted == 4 and machine.generation.workers == [0, 1]
    machine.holds_state(1, 1, 7, 0.0, wanted=4)
    assert machine.generation.workers == [0, 1, 2, 3] and machine.generation.newcomers == {2, 3}
    assert (machine.generation.donor, machine.exchange, held(machine)) == (0, 0, [4, 5])


def test_at_the_end_those_who_were_never_needed_leave_well() -> None:
    machine = begun(4)
    exchange(machine, 2)
    machine.bye(0, 0.0)
    assert machine.generation.workers == [1] and held(machine) == [2, 3]  # nobody begins at the end
    machine.outbox.take()
    machine.bye(1, 0.0)
    assert machine.over and not machine.workers
    assert said(machine, "given_up") == [(2, (1,), NOT_WANTED), (3, (1,), NOT_WANTED)]


def test_hours_of_waiting_end_no_worker() -> None:
    machine = begun(3)
    for minute in range(600):
        for worker in range(3):
            machine.sign_of_life(worker, 60.0 * minute)
        machine.tick(60.0 * minute)
    assert held(machine) == [2]
    machine.tick(60.0 * 600)  # but one that is silent is lost
    assert not machine.workers
