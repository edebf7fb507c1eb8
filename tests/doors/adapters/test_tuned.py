# SPDX-License-Identifier: Apache-2.0
"""Settings of a program that makes its own steps: what it reads with `run.tuned` changes on all workers at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import paceline
from paceline.tuning import Newbob
from tests.helpers import rank, simulate

RULE = "averaging(period=4)"
STEPS = 12


def trained(run: Any, held: Any, ask: dict[int, dict[str, Any]], seen: list[float], stop: int = STEPS) -> None:
    """Steps that write down the rate of each; worker 1 asks."""
    for step in range(run.minibatches, stop):
        if rank() == 1 and step in ask:
            run.tune(**ask[step])
        seen.append(run.tuned("lr", 0.5))
        held -= seen[-1] * (held - 3 - rank())
        run.step()


def test_a_change_reaches_all_workers_at_the_same_block() -> None:
    def program() -> list[float]:
        held, seen = np.ones(3), []
        with paceline.attach_arrays([held], RULE) as run:
            trained(run, held, {1: {"lr": 0.25}, 5: {"lr_factor": 0.5}}, seen)
        return seen

    assert simulate(program, 3) == [[0.5] * 4 + [0.25] * 4 + [0.125] * 4] * 3


def test_what_the_program_does_not_read_is_refused_and_what_it_reads_is_named() -> None:
    held = np.ones(3)
    with paceline.attach_arrays([held], RULE, momentum=[np.zeros(3)], decay=0.9) as run:
        for name in ("lr", "lr_factor", "momentum", "weight_decay"):
            with pytest.raises(paceline.UnsupportedError, match=r"has not asked for .*What can be tuned is period"):
                run.tune(**{name: 0.5})
        assert run.tuned("momentum", 0.9) == 0.9 and run.tuned("lr", 0.1) == 0.1
        run.tune(momentum=0.5, lr_factor=2.0)
        assert run.tuned("momentum", 0.9) == 0.5 and run.tuned("lr", 0.1) == 0.2
        run.tune(revert=True)
        assert run.tuned("momentum", 0.9) == 0.9 and run.tuned("lr", 0.1) == 0.1
        with pytest.raises(paceline.UnsupportedError, match="can read lr, momentum"):
            run.tuned("betas", 0.5)
        with pytest.raises(paceline.RuleError, match="at least 0"):
            run.tuned("lr", -1.0)
    with pytest.raises(paceline.ClosedError):
        run.tuned("lr", 0.1)


def test_newbob_halves_the_rate_of_arrays() -> None:
    def program() -> list[float]:
        held, seen = np.ones(3), []
        with paceline.attach_arrays([held], RULE) as run:
            schedule = Newbob(run)
            for loss in (2.0, 1.5, 1.499):
                trained(run, held, {}, seen, run.minibatches + 4)
                schedule.validated(loss)
            trained(run, held, {}, seen, run.minibatches + 8)
        return seen

    assert simulate(program, 2) == [[0.5] * 16 + [0.25] * 4] * 2
