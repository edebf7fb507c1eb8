# SPDX-License-Identifier: Apache-2.0
"""The ledger, step by step: free, leased, done; who is lost; a new keeper; checkpoints. Histories are elsewhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.data.ledger.epoch_ledger import ENDLESS, Mark, Question
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.errors import MismatchError


def ask(ledger: Ledger, worker: int, epoch: int = 0, total: int = 10, **about: Any) -> Mark | None:
    return ledger.ask(worker, Question(0, epoch, total, **{"unit": 2, **about}))


def drain(ledger: Ledger, worker: int, epoch: int = 0, total: int = 10) -> list[tuple[int, int]]:
    """All that the worker can have, done at once: (epoch, place) pairs."""
    found: list[tuple[int, int]] = []
    while (mark := ask(ledger, worker, epoch, total)) is not None:
        ledger.done(worker, [mark])
        found += [(mark[1], place) for place in range(mark[2], mark[3])]
    return found


def test_leases_end_at_multiples_of_the_unit() -> None:
    ledger = Ledger()
    assert ask(ledger, 0, total=100, unit=8) == (0, 0, 0, 8)
    ledger.give_back(0, [(0, 0, 3, 8)])
    assert ask(ledger, 1, total=100, unit=8) == (0, 0, 3, 8)
    assert ask(ledger, 1, total=100, unit=8) == (0, 0, 8, 16)


def test_an_epoch_is_over_when_nothing_is_left_that_may_come_back() -> None:
    ledger = Ledger()
    mark = ask(ledger, 0, total=4)
    assert mark == (0, 0, 0, 2) and not ledger.over(0, 0)
    assert ask(ledger, 1, total=4) == (0, 0, 2, 4)
    assert ask(ledger, 1, total=4, dry=True) is None and not ledger.over(0, 0)  # 0 may yet be lost with its place
    assert ledger.holders(0, 0) == [0]
    ledger.done(0, [mark])
    assert ledger.over(0, 0)  # 1 holds the other, but has nothing to do but to push it
    assert ask(ledger, 0, epoch=1, total=4) is not None


def test_what_a_lost_worker_held_is_for_others() -> None:
    ledger = Ledger()
    mark = ask(ledger, 0)
    assert mark is not None
    ledger.done(0, [(*mark[:3], mark[2] + 1)])
    ledger.lost(0)
    assert sorted(drain(ledger, 1)) == [(0, place) for place in range(1, 10)]


def test_workers_with_data_of_different_lengths_are_told_so() -> None:
    ledger = Ledger()
    ask(ledger, 0, total=10)
    with pytest.raises(MismatchError, match="has 10 samples on one and 12 on another"):
        ask(ledger, 1, total=12)


def test_an_epoch_that_is_left_early_is_dropped_when_nobody_is_in_it_any_more() -> None:
    ledger = Ledger()
    mine, other = ask(ledger, 0), ask(ledger, 1)
    assert mine is not None and other is not None
    ledger.done(0, [mine])
    ledger.leave_early(0, 0, 0, [])
    assert ask(ledger, 0, epoch=1) == (0, 1, 0, 2)  # nothing of the epoch that it left
    ledger.done(1, [other])
    assert ask(ledger, 1) == (0, 0, 4, 6)  # who is in it goes on
    ledger.leave_early(1, 0, 0, [(0, 0, 4, 6)])
    ask(ledger, 1, epoch=1)
    assert [row["key"] for row in ledger.state()["books"]] == [[0, 1]] and ledger.over(0, 0)


def test_the_length_of_a_stream_becomes_known() -> None:
    ledger = Ledger()
    mark = ask(ledger, 0, total=ENDLESS, unit=4)
    assert mark == (0, 0, 0, 4)
    ledger.done(0, [(0, 0, 0, 2)])
    ledger.ends(0, 0, 3)
    assert ledger.epochs.unfinished(0) == {0: Ranges([(2, 3)])}
    ledger.done(0, [(0, 0, 2, 3)])
    assert ledger.over(0, 0) and ledger.epochs.unfinished(0) == {}


# -- checkpoints ----------------------------------------------------------------------------------


def used() -> Ledger:
    """A ledger with something of everything."""
    ledger = Ledger()
    for now, worker in enumerate((0, 1, 2)):
        mark = ledger.ask(worker, Question(0, 0, 100, unit=4), now=float(now))
        assert mark is not None
        ledger.done(worker, [(*mark[:3], mark[2] + 2)])
    ledger.ask(1, Question(1, 0, ENDLESS), now=3.0)
    ledger.leave_early(1, 1, 0, [])
    ledger.epochs.expect(0, 5, Ranges([(3, 9)]))
    ledger.epochs.expect(2, 4, Ranges())
    return ledger


def test_the_state_is_the_ledger_and_fits_json() -> None:
    state = used().state(9.0)
    again = Ledger()
    again.load(json.loads(json.dumps(state)), 9.0)
    assert again.state(9.0) == state
    question, first = Question(0, 0, 100, unit=4), used()
    assert [again.ask(k % 3, question, 9.5) for k in range(9)] == [first.ask(k % 3, question, 9.5) for k in range(9)]


def test_the_clock_of_a_resumed_run_may_be_another() -> None:
    """Speeds are of what was seen, whatever the clock shows: the next lease is the same."""
    question, state = Question(0, 0, 100, unit=4, most=100), used().state(9.0)
    found = []
    for now in (9.0, 109.0, 2.0):
        ledger = Ledger()
        ledger.load(state, now)
        found.append(ledger.ask(0, question, now + 1.0))
    assert found[0] == found[1] == found[2]


def test_an_epoch_that_is_over_between_two_that_are_not_is_known_to_be_over() -> None:
    ledger = Ledger()
    ask(ledger, 0)
    while (mark := ask(ledger, 1)) is not None:
        ledger.done(1, [mark])
    drain(ledger, 1, epoch=1)
    ask(ledger, 1, epoch=2)
    assert ledger.epochs.unfinished(0) == {0: Ranges([(0, 2)]), 1: Ranges(), 2: Ranges([(0, 10)])}


def test_only_what_is_expected_of_an_epoch_is_leased() -> None:
    ledger = Ledger()
    ledger.epochs.expect(0, 3, Ranges([(2, 4), (8, 9)]))
    assert sorted(drain(ledger, 0, epoch=3)) == [(3, 2), (3, 3), (3, 8)]
    assert len(drain(ledger, 0, epoch=4)) == 10


def test_settled_is_stricter_than_over() -> None:
    ledger = Ledger()
    mark = ask(ledger, 0, total=2)
    assert mark == (0, 0, 0, 2) and ledger.held(0) == [mark] and ledger.held(1) == []
    assert ask(ledger, 0, total=2, dry=True) is None
    assert ledger.over(0, 0) and not ledger.settled(0, 0)  # 0 has trained on it, and it is in no model
    ledger.done(0, [mark])
    assert ledger.settled(0, 0) and ledger.held(0) == []


def test_a_mark_that_comes_twice_is_counted_and_changes_nothing() -> None:
    ledger = Ledger()
    mark = ask(ledger, 0)
    assert mark is not None
    ledger.done(0, [mark])
    before = ledger.state()["books"]
    ledger.done(0, [mark])
    assert ledger.state()["books"] == before and ledger.repeated == 2


def test_a_mark_of_a_lease_that_went_back_takes_the_places_from_the_pile() -> None:
    ledger = Ledger()
    mark = ask(ledger, 0)
    assert mark is not None
    ledger.give_back(0, [mark])
    ledger.done(0, [mark])
    assert ledger.repeated == 0 and sorted(drain(ledger, 1)) == [(0, place) for place in range(2, 10)]
