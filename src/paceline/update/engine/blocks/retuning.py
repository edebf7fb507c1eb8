# SPDX-License-Identifier: Apache-2.0
"""Applies changes of the rule's settings that all workers have agreed on."""

from __future__ import annotations

from paceline.rules.rule import Rule
from paceline.update.engine.blocks.fragmented_model import FragmentedModel
from paceline.update.engine.context import RunContext


class Retuning:
    """Applies the rule's new settings to the blocks.

    Args:
        run: the context that the parts of the run share.
        blocks: the run's blocks, or None.
    """

    def __init__(self, run: RunContext, blocks: FragmentedModel | None) -> None:
        self._tuner, self._transport, self._blocks = run.tuner, run.transport, blocks
        self.rule = run.rule

    def begin(self, rule: Rule, blocks: FragmentedModel | None) -> None:
        """Continue with another rule and its blocks."""
        self.rule, self._blocks = rule, blocks

    def agree(self) -> None:
        """Gather the workers' requests, and decide; every worker calls it at the same place."""
        self._tuner.exchange_requests(self._transport)

    def apply(self, now: int) -> None:
        """Apply the decision, if any; `now` counts the steps since the first block began."""
        if not self._tuner.decided:
            return
        self._tuner.apply()
        self.follow(self._tuner.rule, now)

    def follow(self, rule: Rule, now: int = 0) -> None:
        """Continue with changed settings of the rule."""
        if rule is not self.rule and self._blocks is not None:
            self._blocks.retune(rule, now)
        self.rule = rule
