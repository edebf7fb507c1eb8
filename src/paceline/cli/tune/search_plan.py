# SPDX-License-Identifier: Apache-2.0
"""What a search was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.console import refuse
from paceline.errors import PacelineError
from paceline.tuning.names import OF_RULES
from paceline.tuning.population import Values
from paceline.tuning.proposals import optuna
from paceline.tuning.space import Space, space


@dataclass(frozen=True)
class SearchPlan:
    """What was asked for; see `paceline tune --search --help`."""

    program: list[str]
    search: list[str]
    groups: int
    workers: int
    rounds: int
    blocks: int
    measure: str
    maximize: bool
    together: int
    rule: str | None
    timeout_s: float
    seed: int

    @property
    def space(self) -> Space:
        """What is searched."""
        return space(self.search)


def check(plan: SearchPlan) -> None:
    """Refuse what cannot be, before anything starts."""
    try:
        names = list(plan.space)
        optuna()
    except PacelineError as error:
        refuse(str(error))
    for name in names:
        if name in OF_RULES and plan.workers == 1:
            refuse(f"{name} changes nothing for a worker that has nobody to exchange with; give more --workers")


def exchanges(plan: SearchPlan, values: Values) -> int:
    """Of a group in a round: as many minibatches for all, where they have different periods."""
    if "period" not in values:
        return plan.blocks
    return max(1, round(plan.blocks * int(plan.space["period"].at(1.0)) / int(values["period"])))
