# SPDX-License-Identifier: Apache-2.0
"""The options of a search."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.cli.console import refuse
from paceline.errors import PacelineError
from paceline.tuning.names import OF_RULES
from paceline_plugins.search.population import Values
from paceline_plugins.search.proposals import optuna
from paceline_plugins.search.space import Space, space


@dataclass(frozen=True)
class SearchPlan:
    """The options; see `paceline tune --search --help`."""

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
        return space(self.search)


def check(plan: SearchPlan) -> None:
    """Refuse invalid options before anything starts."""
    try:
        names = list(plan.space)
        optuna()
    except PacelineError as error:
        refuse(str(error))
    for name in names:
        if name in OF_RULES and plan.workers == 1:
            refuse(f"{name} has no effect on one worker, which exchanges nothing; give more --workers")


def exchanges(plan: SearchPlan, values: Values) -> int:
    """Exchanges of a group in a round: the same number of minibatches in groups of different periods."""
    if "period" not in values:
        return plan.blocks
    return max(1, round(plan.blocks * int(plan.space["period"].at(1.0)) / int(values["period"])))
