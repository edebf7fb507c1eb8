# SPDX-License-Identifier: Apache-2.0
"""When an exchange is due."""

from __future__ import annotations

import pytest

from paceline.flow import Flow
from paceline.schedule import EveryBlock, EveryStep


def due(schedule: EveryStep | EveryBlock, steps: int) -> list[str]:
    """What each step says; the caller takes note of the end of the warm-up and of a block, as a run does."""
    flow, found = Flow(schedule), []
    for _ in range(steps):
        word = flow.stepped()
        if word == "block":
            flow.since = 0
        if word == "warm":
            flow.warm = True
        found.append(word)
    return found


def test_every_step_is_always_lockstep() -> None:
    flow = Flow(EveryStep())
    for _ in range(5):
        assert flow.lockstep
        assert flow.stepped() == ""
    assert flow.steps == 5


def test_blocks() -> None:
    assert due(EveryBlock(3), 7) == ["", "", "block", "", "", "block", ""]
    assert due(EveryBlock(1), 2) == ["block", "block"]


def test_blocks_after_a_warm_up() -> None:
    assert due(EveryBlock(2, warmup=3), 8) == ["", "", "warm", "", "block", "", "block", ""]
    assert due(EveryBlock(2, warmup=1), 3) == ["warm", "", "block"]


@pytest.mark.parametrize("warmup", [0, 2])
def test_lockstep_is_the_warm_up(warmup: int) -> None:
    flow, seen = Flow(EveryBlock(2, warmup)), []
    for _ in range(4):
        seen.append(flow.lockstep)
        flow.warm = flow.stepped() == "warm" or flow.warm
    assert seen == [True] * warmup + [False] * (4 - warmup)


def test_in_words() -> None:
    assert EveryBlock(8).describe(4) == "every 8 minibatches"
    assert "3 synchronous steps" in EveryBlock(8, 3).describe(4)
    assert EveryStep().describe(4) == "every step"
