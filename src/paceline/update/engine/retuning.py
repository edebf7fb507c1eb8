# SPDX-License-Identifier: Apache-2.0
"""Changes of the rule's numbers, once all workers have agreed on them."""

from __future__ import annotations

from paceline.rules.rule import Rule
from paceline.update.engine.blocks.schedule import Blocks
from paceline.update.engine.context import RunContext


class Retuning:
    """Brings the rule's new numbers to the blocks.

    Args:
        run: what the parts of the run share.
        blocks: where there are any.
    """

    def __init__(self, run: RunContext, blocks: Blocks | None) -> None:
        self._tuner, self._transport, self._blocks = run.tuner, run.transport, blocks
        self.rule = run.rule

    def agree(self) -> None:
        """Learn what workers have asked for, and decide; every worker calls it at the same place."""
        self._tuner.hear(self._transport)

    def apply(self, now: int) -> None:
        """Apply the decision, if there is one; `now` counts the steps since the first block began."""
        if not self._tuner.decided:
            return
        self._tuner.apply()
        self.follow(self._tuner.rule, now)

    def follow(self, rule: Rule, now: int = 0) -> None:
        """Go on with other numbers of the rule."""
        if rule is not self.rule and self._blocks is not None:
            self._blocks.retune(rule, now)
        self.rule = rule
