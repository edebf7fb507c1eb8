# SPDX-License-Identifier: Apache-2.0
"""Runs seeds of storms, and makes failures smaller."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from paceline.testing.storm.control import ControlStorm
from paceline.testing.storm.elastic import ElasticStorm, Outcome
from paceline.testing.storm.training import TrainingStorm

KINDS: dict[str, type[ElasticStorm]] = {"control": ControlStorm, "run": TrainingStorm}
"""What storms are over: the control plane and its ledger; whole elastic runs with models."""


def storm(seed: int, kind: str = "control", faults: Sequence[str] = (), without: Collection[int] = ()) -> Outcome:
    """Run one seed.

    Args:
        seed: decides everything.
        kind: "control" or "run".
        faults: names of those that may happen; all by default.
        without: numbers of faults that are left out.
    """
    return KINDS[kind](seed, faults, without).run()


def shrunk(outcome: Outcome, kind: str = "control", faults: Sequence[str] = ()) -> tuple[Outcome, list[int]]:
    """The same failure with as few faults as possible, and the numbers of those that were left out."""
    without: list[int] = []
    for number in range(outcome.drawn):
        again = storm(outcome.seed, kind, faults, [*without, number])
        if again.problems:
            outcome, without = again, [*without, number]
    return outcome, without
