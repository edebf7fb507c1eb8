# SPDX-License-Identifier: Apache-2.0
"""The period under a bound on the held-out loss: :class:`.loss_bound.LossBound` goes where measured times want.

Each worker tells the others the held-out losses that it has logged, with its measured times, after the next exchange.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.rules.schedule import Paced
from paceline.tuning.held_out import HeldOutLog, together
from paceline.tuning.loss_bound import LossBound, Place
from paceline.tuning.names import Changes
from paceline.tuning.period_controller import PeriodController
from paceline.tuning.timers import Timer

SILENT = 64
"""Blocks without a held-out loss after which the run says so."""


class BoundedPeriod(PeriodController):
    """A period controller whose changes have to stay within a bound.

    Args:
        timer: measures times.
        schedule: of the rule that was asked for; it has a bound.
        workers: N.

    Attributes:
        bound: decides.
    """

    def __init__(self, timer: Timer, schedule: Paced, workers: int) -> None:
        super().__init__(timer)
        assert schedule.bound is not None
        self.bound, self._log = LossBound(schedule.bound), HeldOutLog(workers)
        self._grows, self._target, self._told = schedule.grow is not None, schedule.period, False

    # -- on this worker ---------------------------------------------------------------------------

    def stepped(self, blocks: int, steps: int) -> None:
        super().stepped(blocks, steps)
        self._log.stepped(steps)
        if blocks >= SILENT and not (self._told or self.bound.name or self._log.waits):
            self._told = True
            self.bound.told.append((_silence(self.bound.bound, f"in {blocks} blocks"), {"event": "silent"}))

    def logged(self, values: Mapping[str, float], rate: float) -> None:
        self._log.logged(values, rate)

    @property
    def due(self) -> bool:
        return self._log.waits or super().due

    def said(self) -> Any:
        return {"times": super().said(), "held_out": self._log.said()}

    # -- on all workers ---------------------------------------------------------------------------

    def agree(self, rows: Sequence[Any], schedule: Paced, blocks: int) -> tuple[Changes, str] | None:
        wanted = super().agree([row["times"] for row in rows], replace(schedule, period=self._target), blocks)
        if wanted is not None:
            self._target = wanted[0]["period"]
        made, name, found = together([row["held_out"] for row in rows], self.bound.name)
        self._log.heard()
        self.bound.name = name
        if self.held:
            self.bound.drop()
            return None
        place = Place(made, schedule.period, self._target, self._log.workers, self._grows)
        changed = self.bound.look(place, found)
        return None if changed is None else ({"period": changed[0]}, changed[1])

    def among(self, workers: int) -> None:
        self._log.workers = workers
        self.bound.among(workers)
        self.renew()

    @property
    def may_grow(self) -> bool:
        return self.bound.may_grow

    # -- what it says -----------------------------------------------------------------------------

    def told(self) -> list[tuple[str, dict[str, Any]]]:
        told, self.bound.told = self.bound.told, []
        return told

    def conclusion(self, period: int, exchanging: float) -> str:
        bound, wants = self.bound, f"where measured times want {self._target}"
        took = f"exchanges took {100 * exchanging:.2g} % of the time"
        if not bound.name:
            return f"{_silence(bound.bound, 'at all')}; the period was {period} {wants}, and {took}"
        text = f"within {100 * bound.bound:g} %: period {period} {wants}; {took}"
        if not bound.kept and not bound.withdrawn:
            done = bound.blocked or ("no change was needed" if period >= self._target else "no change was begun")
            return f"{text}; nothing of the bound is spent: {done}"
        last = f"; {bound.blocked}" if bound.blocked else ""
        return (
            f"{text}; changes kept: {bound.kept}, withdrawn: {bound.withdrawn}, by {bound.name}; at most "
            f"{100 * bound.spent:.2g} % of the loss is spent{last}"
        )

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        return {**super().state(), "target": self._target, "made": self._log.made, "bound": self.bound.state()}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        workers = self._log.workers
        self._target = state["target"]
        self._log.made = state["made"]
        self.bound.load(state["bound"])
        self.bound.among(workers)


def _silence(bound: float, when: str) -> str:
    return (
        f"within {100 * bound:g} %: the program has logged no held-out loss {when}, such as run.log(held_out=loss), so "
        "nothing can be measured, and nothing grows"
    )
