# SPDX-License-Identifier: Apache-2.0
"""When an exchange is due."""

from __future__ import annotations

import pytest

from paceline.errors import RuleError
from paceline.flow import Flow
from paceline.schedule import EveryBlock, EveryStep


def test_every_step_is_always_lockstep() -> None:
    flow = Flow(EveryStep())
    for _ in range(5):
        assert flow.lockstep
        assert not flow.stepped()
    assert flow.steps == 5


@pytest.mark.parametrize("warmup", [0, 1, 2])
def test_lockstep_is_the_warm_up(warmup: int) -> None:
    flow, seen, over = Flow(EveryBlock(2, warmup)), [], []
    for _ in range(4):
        seen.append(flow.lockstep)
        over.append(flow.stepped())
        flow.warm = over[-1] or flow.warm
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
