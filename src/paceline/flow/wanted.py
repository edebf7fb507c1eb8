# SPDX-License-Identifier: Apache-2.0
"""How many workers an elastic run wants, as each member works it out from what all of them share.

After every exchange all members have counted the same blocks and minibatches, and the headers have told all of them how
many workers they are worth. A joining worker gets the counts with the state, and a checkpoint keeps them. So all
members report the same number with a commit.
"""

from __future__ import annotations

from statistics import mean
from typing import Any

from paceline.errors import CheckpointError
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.model import FragmentedModel
from paceline.update.exchange.exchanger import ExchangeSummary


class WantedWorkers:
    """One member's counts for the growth of the rule.

    Args:
        rule: the rule; without `grow` no number is wanted.
        most: the most members that the user allows.
    """

    def __init__(self, rule: Rule, most: int) -> None:
        self._rule, self._growth, self._most = rule, rule.schedule.grow, most
        self.number = 0  # members that are wanted; 0: as many as there are
        self.workers = 0  # k, the present members
        self.minibatches = 0  # of all workers that are in the model
        self._blocks = self._of = 0  # so many blocks were made by so many workers, the last ones

    @property
    def rate_factor(self) -> float:
        """The factor on the local learning rates of k workers."""
        return self._rule.rate_factor(self.workers)

    def renumber(self, workers: int, wanted: int) -> None:
        """There are other members, or the control plane wants another number."""
        self.workers, self.number = workers, max(self.number, wanted)

    def after(self, summary: ExchangeSummary, blocks: FragmentedModel, fragment: int) -> tuple[int, float]:
        """(members that are wanted after this exchange, how many workers the present ones are worth); changes nothing.

        Called before the exchange of this fragment is applied.
        """
        diversities = [update.numbers.diversity for update in blocks.updates]
        diversities[fragment] = diversities[fragment].after(summary)
        effective = mean(one.effective or 1.0 for one in diversities)
        ends = any(header.leaving for header in summary.headers)
        if self._growth is None or ends or self.workers < self.number:  # more are wanted already than there are
            return self.number, effective
        made, minibatches = self._with(summary, fragment)
        next_number = self._growth.next(self.workers, self._most, effective, made, minibatches)
        return max(self.number, next_number), effective

    def advance(self, summary: ExchangeSummary, fragment: int) -> None:
        """The exchange was applied."""
        if fragment == 0 and summary.weight:
            self._blocks, self.minibatches = self._with(summary, fragment)
            self._of = self.workers

    def _with(self, summary: ExchangeSummary, fragment: int) -> tuple[int, int]:
        """Blocks of k workers and minibatches of all, with this exchange; fragments share their minibatches."""
        blocks = self._blocks if self._of == self.workers else 0
        if fragment or not summary.weight:
            return blocks, self.minibatches
        return blocks + 1, self.minibatches + sum(summary.minibatches)

    def state(self) -> dict[str, int]:
        """State for a checkpoint, and for joining workers."""
        return {"wanted": self.number, "minibatches": self.minibatches, "blocks": self._blocks, "of": self._of}

    def load(self, state: dict[str, Any] | None) -> None:
        """Restore `state`; None from before there was one."""
        if state is not None:
            self.number = max(self.number, state["wanted"])
            self.minibatches, self._blocks, self._of = state["minibatches"], state["blocks"], state["of"]


def refuse_waiting(growth: dict[str, int] | None, workers: int) -> None:
    """Refuse a checkpoint of `workers` workers of which some waited for their turn: their optimizers' state is old.
    `growth` is the checkpoint's; None unless its number of workers grew."""
    if growth is not None and growth["workers"] < workers:
        raise CheckpointError(
            f"the checkpoint was made while {growth['workers']} of {workers} workers trained and the others waited "
            "(grow=): only elastic runs grow now; resume from a checkpoint that was made when all trained"
        )
