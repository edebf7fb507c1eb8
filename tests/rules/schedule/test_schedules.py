# SPDX-License-Identifier: Apache-2.0
"""When an exchange is due."""

from __future__ import annotations

import pytest

from paceline.errors import RuleError
from paceline.rules.schedule import Bounded, EveryBlock, EveryStep
from paceline.update.monitor import TrainingProgress


def test_every_step_is_always_lockstep() -> None:
    progress = TrainingProgress(EveryStep())
    for _ in range(5):
        assert progress.lockstep
        assert not progress.stepped()
    assert progress.steps == 5


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_lockstep_is_the_warm_up(warmup: int) -> None:
    progress, seen, over = TrainingProgress(EveryBlock(2, warmup)), [], []
    for _ in range(4):
        seen.append(progress.lockstep)
        over.append(progress.stepped())
        if over[-1]:
            progress.end_warmup()
    assert seen == [True] * warmup + [False] * (4 - warmup)
    assert over == [step == warmup for step in range(1, 5)]


@pytest.mark.parametrize(
    ("schedule", "want"),
    [
        (EveryBlock(3), [3, 6, 9, 12]),
        (EveryBlock(1), [1, 2, 3, 4]),
        (EveryBlock(8, fragments=4), [2, 4, 6, 8, 10, 12, 14, 16]),
        (EveryBlock(5, fragments=2), [2, 5, 7, 10]),
        (EveryBlock(3, fragments=3), [1, 2, 3, 4]),
    ],
)
def test_when_exchanges_begin(schedule: EveryBlock, want: list[int]) -> None:
    assert [schedule.ends(k) for k in range(len(want))] == want


@pytest.mark.parametrize(
    "wrong", [{"fragments": 0}, {"fragments": 9}, {"overlap": -1}, {"overlap": 9}, {"overlap": 1.5}]
)
def test_bad_numbers(wrong: dict[str, int]) -> None:
    with pytest.raises(RuleError, match=next(iter(wrong))):
        EveryBlock(8, **wrong)


def test_in_words() -> None:
    assert EveryBlock(8).describe(4) == "every 8 minibatches"
    assert "3 synchronous steps" in EveryBlock(8, 3).describe(4)
    assert EveryStep().describe(4) == "every step"
    assert Bounded().describe(4) == "every minibatch, each worker by itself, free; the answer a minibatch later"
    assert Bounded(3, 8, 0).describe(4) == (
        "every 8 minibatches, each worker by itself, at most 3 ahead of the slowest; waits for the answer"
    )


@pytest.mark.parametrize("staleness", [1, 2, 5])
def test_who_may_start(staleness: int) -> None:
    bounded = Bounded(staleness, overlap=0)
    for slowest in range(4):
        may = [bounded.may_start(slowest + ahead, slowest) for ahead in range(staleness + 3)]
        assert may == [True] * (staleness + 1) + [False, False]


def test_the_free_may_always_start() -> None:
    assert all(Bounded().may_start(clock, 0) for clock in (0, 1, 10**9))


def test_the_bound_keeps_two_workers_together() -> None:
    """The fast one runs whenever it may: it is never more than s + 1 clocks ahead, and comes that far."""
    bounded, fast, most = Bounded(2, overlap=0), 0, 0
    for slow in range(5):
        while bounded.may_start(fast, slow):
            fast += 1
        most = max(most, fast - slow)
    assert most == 3


def test_nothing_is_due_in_lockstep_where_each_worker_goes_by_itself() -> None:
    progress = TrainingProgress(Bounded(period=2))
    for _ in range(5):
        assert not progress.lockstep
        assert not progress.stepped()
    assert progress.steps == 5


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"staleness": 0, "overlap": 0}, r"at least 1 \(lockstep is EveryStep\(\)\), got 0"),
        ({"staleness": 3}, r"overlap must be 0 with a finite staleness \(3\).*got 1"),
        ({"period": 0}, "period must be"),
        ({"overlap": 2}, "overlap must be"),
        ({"overlap": -1}, "overlap must be"),
        ({"hold": 0}, "hold must be a whole number of blocks, at least 1, got 0"),
        ({"hold": None}, "hold must be"),
    ],
)
def test_bad_numbers_of_a_bound(wrong: dict[str, int], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        Bounded(**wrong)
