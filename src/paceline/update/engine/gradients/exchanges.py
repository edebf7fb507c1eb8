# SPDX-License-Identifier: Apache-2.0
"""The gradient exchanges of a run."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from paceline.update.engine import agreement
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import ScalerHook, refuse_hidden_scaler, stepping_scaler
from paceline.update.engine.gradients.context import GradientContext
from paceline.update.engine.gradients.update import GradientUpdate
from paceline.update.exchange.exchanger import Exchanger, PendingHeader
from paceline.update.exchange.header import ExchangeSummary


class GradientExchanges:
    """One update for each optimizer while gradients are exchanged.

    Args:
        run: the context that the parts of the run share.
        within_host: whether gradients are exchanged inside a host at every step.

    Attributes:
        context: the context that the updates share.
        updates: of the optimizers, in order.
        running: whether they exchange gradients.
    """

    def __init__(self, run: RunContext, within_host: bool) -> None:
        self._run, self.context = run, GradientContext(run, within_host)
        self.updates: list[GradientUpdate] = []
        self.running = False
        self._scaler_hook: ScalerHook | None = None

    def start(self, exchanger: Exchanger) -> None:
        """Exchange gradients over this connection from now on."""
        self.running = True
        self.updates = [GradientUpdate(self.context, exchanger, number) for number in range(len(self._run.owned))]
        scaler = self._run.settings.scaler
        if scaler is not None:
            self._scaler_hook = ScalerHook(
                scaler, lambda optimizer: self._settle(optimizer, scaler), self._is_due, self.after_step
            )

    def stop(self) -> None:
        """Exchange no more gradients, and remove the hooks."""
        self.running = False
        for update in self.updates:
            update.close()
        if self._scaler_hook is not None:
            self._scaler_hook.remove()
            self._scaler_hook = None

    def _is_due(self, optimizer: Optimizer) -> bool:
        return any(optimizer is one for one, _ in self._run.owned) and self.context.each_step

    def _update_of(self, optimizer: Optimizer) -> GradientUpdate:
        return self.updates[next(k for k, (one, _) in enumerate(self._run.owned) if one is optimizer)]

    def before_step(self, optimizer: Optimizer) -> None:
        """Make sure that the gradients are the workers' mean."""
        if not self.context.each_step or (self._scaler_hook is not None and id(optimizer) in self._scaler_hook.done):
            return
        scaler = stepping_scaler()
        if scaler is not None:
            refuse_hidden_scaler(self._run.rule, scaler, self._update_of(optimizer).landed)
        self._settle(optimizer, scaler)

    def _settle(self, optimizer: Optimizer, scaler: Any) -> None:
        """Exchange the gradients, for a step made by `scaler`, or by the program itself (None)."""
        agreement.check_unchanged(self._run.owned, optimizer)
        update = self._update_of(optimizer)
        update.scaling.stepped_by(scaler)
        update.before_step()
        if update.problem is not None and scaler is None:  # a scaler finds it on every worker, and all skip
            raise update.problem

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer made a step, or skipped it."""
        self._update_of(optimizer).stepped()

    def withdraw(self) -> list[ExchangeSummary]:
        """Finish the exchanges of failed passes, without this worker's part; their summaries."""
        found = [update.withdraw() for update in self.updates]
        return [summary for summary in found if summary is not None]

    def join(self, pending_header: PendingHeader) -> ExchangeSummary:
        """Join the other workers' gradient exchange, with an empty contribution."""
        summary = pending_header.summary()
        return summary if summary.empty else self.updates[summary.kind.optimizer].join(pending_header)
