# SPDX-License-Identifier: Apache-2.0
"""What measured times change, alike on all workers: the rule after a probe, and the period of its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from paceline.rules.choice import Choice
from paceline.rules.rule import Rule
from paceline.tuning.names import Changes
from paceline.tuning.period_controller import PeriodController
from paceline.tuning.rule_chooser import RuleChooser
from paceline.tuning.tunables import Tunables

PeriodControllerFor = Callable[[Rule], PeriodController | None]


class MeasuredChoices:
    """The chooser of the rule and the controller of the period, where the rule has them.

    Args:
        tunables: the settings.
        chooser: of the rule, if a probe chooses it.
        unprobed: why no probe can begin; empty if it can, or the rule has none.
        period_controller_for: makes the period controller of a rule.

    Attributes:
        period_controller: set under rules whose period follows measured times.
    """

    def __init__(
        self,
        tunables: Tunables,
        chooser: RuleChooser | None = None,
        unprobed: str = "",
        period_controller_for: PeriodControllerFor = lambda rule: None,
    ) -> None:
        self._tunables, self.chooser, self._unprobed = tunables, chooser, unprobed
        self._period_controller_for = period_controller_for
        self.period_controller: PeriodController | None = None

    def begin(self) -> None:
        """The run exchanges: take the rates of its workers, and control the period where no probe comes first."""
        self.follow_workers()
        if not self.probing:
            self.period_controller = self._period_controller_for(self._tunables.rule)

    # -- measuring --------------------------------------------------------------------------------

    @property
    def due(self) -> bool:
        """Whether it is time to gather the measurements."""
        return any(one is not None and one.due for one in (self.period_controller, self.chooser))

    def stepped(self, place: Callable[[], tuple[int, int]]) -> None:
        """A step was made; `place` returns (exchanged blocks, minibatches of this worker)."""
        if self.period_controller is not None:
            self.period_controller.stepped(*place())
        if self.chooser is not None:
            self.chooser.stepped(place()[1])

    def said(self) -> Any:
        """This worker's measurements as JSON values; None before there are enough."""
        if self.chooser is None:
            return self.period_controller.said() if self.period_controller is not None else None
        pace = self.period_controller.said() if self.period_controller is not None else None
        return [pace, self.chooser.said()]

    def agree(self, measured: Sequence[Any], blocks: int) -> tuple[Changes, str] | None:
        """Choose, the same on every worker; (what else changes, why), or None. `measured`: `said` of each worker."""
        if self.chooser is not None:
            of_chooser = [row[1] for row in measured]
            measured = [row[0] for row in measured]
            self.chooser.agree(of_chooser)
        if self.period_controller is None:
            return None
        return self.period_controller.agree(measured, self._tunables.rule.paced, blocks)

    def renew(self) -> None:
        """The workers have changed."""
        if self.period_controller is not None:
            self.period_controller.renew()

    # -- the rule ---------------------------------------------------------------------------------

    @property
    def probing(self) -> bool:
        """Whether a probe is under way."""
        return self.chooser is not None and self.chooser.probing

    @property
    def sends_early(self) -> bool:
        """Whether gradients are exchanged during the backward pass."""
        return self.chooser is None or self.chooser.early

    @property
    def chosen(self) -> Choice | None:
        """A choice of the rule that has not taken effect yet."""
        return self.chooser.choice if self.chooser is not None and self.chooser.pending else None

    @property
    def gave_up(self) -> bool:
        """Whether a probe ended before this step, which exchanges no gradients."""
        return self.chooser is not None and self.chooser.pending and self.chooser.gave_up

    def end_probe(self, why: str, steps: int) -> None:
        """Choose blocks without further times after `steps` steps, because gradients cannot be exchanged."""
        if self.chooser is not None and self.probing:
            self.chooser.give_up(why, steps)

    def rule_of(self, saved: dict[str, Any] | None) -> Rule:
        """The rule under which a checkpoint was made, with its choice."""
        return self._tunables.rule if self.chooser is None else self.chooser.rule_of(saved)

    def take(self) -> str | None:
        """Continue with the rule that was chosen, if that has not taken effect yet; returns why, for display."""
        chooser, chosen = self.chooser, self.chosen
        if chooser is None or chosen is None:
            return None
        before = self._tunables.rule
        chooser.pending = False
        self._use(chooser)
        self._tunables.scale_rates(chooser.rate_factor)
        factor = chooser.rate_factor * self._tunables.rates.common
        if self._tunables.rule.schedule.exchanges_blocks:
            self._keep_numbers(before, chooser.asked)
        return f"{chooser.asked.name}: {chosen.why}{_of_one(factor)}"

    def at_once(self) -> str:
        """That blocks begin at once, with a learning rate that is not the program's; empty if not so."""
        rule, factor = self._tunables.rule, self._tunables.rates.common
        if self.probing or factor == 1:
            return ""
        why = f" without a probe: {self._unprobed}" if self._unprobed else ""
        return f"{rule.name}: blocks of {rule.schedule.period} minibatches{why}{_of_one(factor)}"

    def _keep_numbers(self, before: Rule, asked: Rule) -> None:
        """Keep the numbers of the rule that were set during the probe."""
        rule = self._tunables.rule = replace(self._tunables.rule, outer=before.outer)
        if before.schedule.period != asked.schedule.period:
            period = max(before.schedule.period, rule.schedule.overlap)
            self._tunables.rule = replace(rule, schedule=replace(rule.paced, period=period))
            if self.period_controller is not None:
                self.period_controller.held = True

    def _use(self, chooser: RuleChooser) -> None:
        """Continue with the chooser's present rule."""
        self._tunables.rule = chooser.rule
        self.follow_workers()
        self.period_controller = None if chooser.probing else self._period_controller_for(chooser.rule)

    def follow_workers(self) -> None:
        """Give the local learning rates the factor that the rule has for this number of workers."""
        tunables = self._tunables
        tunables.rates.common = 1.0 if self.probing else tunables.rule.rate_factor(tunables.workers)

    # -- checkpoints ------------------------------------------------------------------------------

    def load_choice(self, state: dict[str, Any], same: bool, steps: int) -> dict[str, Any]:
        """Continue with the saved choice, or begin the probe on another number of workers; the numbers to load.

        Args:
            state: of the tuner.
            same: whether it is this worker's own.
            steps: this worker's.
        """
        saved, chooser = state.get("choice"), self.chooser
        knobs: dict[str, Any] = state["knobs"]
        if chooser is not None:
            if same or state.get("pace") is not None or (saved is not None and saved["choice"] is not None):
                chooser.load(saved, steps)
            else:
                chooser.renew(steps)
            self._use(chooser)
        if saved is not None and not same:  # the factor follows from the number of workers
            factor = float(saved["factor"]) / (chooser.rate_factor if chooser is not None else 1.0)
            factors = [[number, one / factor] for number, one in knobs["factors"]]
            knobs = {"rule": knobs["rule"] if chooser is not None else None, "factors": factors}
        return knobs


def _of_one(factor: float) -> str:
    return "" if factor == 1 else f"; the learning rate is {factor:.3g} times one worker's"
