# SPDX-License-Identifier: Apache-2.0
"""The context that the gradient updates of a run share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from paceline.update.engine.context import RunContext
from paceline.update.engine.gradients.hooks import PassEnd
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeSummary
from paceline.update.exchange.work import LocalWork


class GradientContext:
    """The context that the gradient updates of a run share; each optimizer has one update.

    Args:
        run: the context that all parts of the run share.
        within_host: whether gradients are exchanged inside a host at every step.

    Attributes:
        local: whether gradients stay on this worker at present.
        closed: whether the run has ended.
        pass_ends: the ends of backward passes.
    """

    def __init__(self, run: RunContext, within_host: bool) -> None:
        self.run, self._within_host = run, within_host
        self.local = self.closed = False
        self.pass_ends = PassEnd()

    @property
    def sends_early(self) -> bool:
        """Whether chunks are sent before the pass is over; not with several optimizers, whose order could differ
        between workers, nor in the first half of a probe."""
        return len(self.run.owned) == 1 and self.run.tuner.measured.sends_early

    @property
    def each_step(self) -> bool:
        """Whether gradients are exchanged before the next step."""
        return (self.run.progress.lockstep or self._within_host) and not self.closed

    @property
    def due(self) -> bool:
        """Whether gradients are exchanged now."""
        return self.each_step and not self.local

    def work(self) -> LocalWork:
        """One minibatch, with the weight of its samples."""
        return LocalWork(1, self.run.progress.steps, self.run.loaders.factor)

    @contextlib.contextmanager
    def timed(self, exchanger: Exchanger, summaries: list[ExchangeSummary]) -> Iterator[None]:
        """Time the part of an exchange that the user waits for, and write it to the event log.

        Args:
            exchanger: makes the exchange.
            summaries: holds the exchange's summary at the end.
        """
        monitor, timing, now = self.run.monitor, exchanger.timing, exchanger.transport.now
        self._wait_for_device()
        monitor.begin()
        began = now()
        yield
        self._wait_for_device()
        timing.exchange_s = now() - began - timing.wait_s
        monitor.end(timing, summaries[0], block=0, warmup=self.run.rule.schedule.exchanges_blocks)

    def _wait_for_device(self) -> None:
        """In steps that are timed, wait for queued kernels: else their time would be counted as the exchange's."""
        if self.run.tuner.measured.probing:
            for device in {p.device for _, named in self.run.owned for _, p in named if p.device.type == "cuda"}:
                torch.cuda.synchronize(device)

    def read_requests(self, summary: ExchangeSummary) -> None:
        """After an exchange: gather the tuning requests, if a worker announced one; they take effect after the step."""
        if summary.asked:
            self.run.tuner.exchange_requests(self.run.transport)
