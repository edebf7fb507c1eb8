# SPDX-License-Identifier: Apache-2.0
"""Clients that push the deltas of blocks, or the parameters themselves; the optimizer steps on the worker."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from paceline.core.flat import Fragment
from paceline.core.optimizer_state import reset_state
from paceline.rules.outer.arrival import CenterPull
from paceline.rules.schedule.bounded import Bounded
from paceline.update.server.client import Client, ClientContext
from paceline.update.server.sharding import Span, host


class DeltaClient(Client):
    """Pushes deltas, or the parameters themselves; the optimizer steps here.

    Args:
        optimizer: its state is reset where the parameters are inf or nan.
        elastic: how worker and center pull each other, where the rule pushes parameters.
        workers: N.
        context, schedule, spans, buffers: as of every client.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        elastic: CenterPull | None,
        workers: int,
        context: ClientContext,
        schedule: Bounded,
        spans: list[Span],
        buffers: list[Span],
    ) -> None:
        super().__init__(context, schedule, spans, buffers)
        self._optimizer, self._elastic, self._workers = optimizer, elastic, workers
        self._base = [span.pulled.clone() for span in self.spans]
        self._then = [host(span.fragment) for span in self.spans]
        self._now = [host(span.fragment) for span in self.spans]
        self.since = 0
        self._written = False

    def take_written(self) -> list[Fragment]:
        """The parameters, if an answer has changed them since the last call."""
        written, self._written = self._written, False
        return [span.fragment for span in self.spans] if written else []

    def on_step(self) -> None:
        """Exchange what is due after a step of the optimizer."""
        self.since += 1
        block = self._schedule.period
        self._collect(wait=self.since >= block * self._schedule.hold)
        if self._pending is None and self.since >= block:
            self._push_block()
        if not self._schedule.overlap:
            self._collect(wait=True)

    @torch.no_grad()
    def _push_block(self) -> None:
        minibatches, self.since = self.since, 0
        ill = not all(span.fragment.finite() for span in self.spans)
        if ill:
            self._restart()
        if ill and self._schedule.staleness is None:
            self._tally.refused += 1
            return
        values = [pool.take() for pool in self._pools]
        for span, base, then, sent in zip(self.spans, self._base, self._then, values, strict=True):
            span.note_version()  # a delta is measured from what was pulled last
            span.read(then)
            if self._elastic is not None:
                sent.copy_(then)
            else:
                torch.sub(then, base, out=sent)
            if ill:
                sent.fill_(torch.nan)  # the owners refuse it, and the clock advances
        self._pending = self._push(values, minibatches)

    def _restart(self) -> None:
        """Go on from the model that was pulled last, with a reset optimizer."""
        for span, base in zip(self.spans, self._base, strict=True):
            span.write(span.pulled)
            base.copy_(span.pulled)
            reset_state(self._optimizer, span.fragment.tensors)

    @torch.no_grad()
    def _apply(self) -> None:
        self._written = True
        for span, base, then, now in zip(self.spans, self._base, self._then, self._now, strict=True):
            span.read(now)
            if self._elastic is not None:
                pull = self._elastic.elastic_pull(then, span.pulled, self._workers)
                span.write(now.sub_(pull))
                span.pulled.add_(pull)  # the center after this worker's pull
                continue
            progress = now.sub_(then)
            if span.fragment.dtype == span.pulled.dtype:
                base.copy_(span.pulled)
                span.write(progress.add_(base))
                continue
            span.write(progress + span.pulled)  # 16 bits: rounding is no progress
            torch.sub(span.read(base), progress, out=base)

    def flush(self) -> None:
        self._collect(wait=True)
        if self.since:
            self._push_block()
            self._collect(wait=True)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "since": self.since, "base": self._base}

    def load(self, state: dict[str, Any]) -> None:
        super().load(state)
        self.since = int(state["since"])
        for base, saved in zip(self._base, state["base"], strict=True):
            base.copy_(saved)

    def begin(self) -> None:
        super().begin()
        self.since = 0
        for span, base in zip(self.spans, self._base, strict=True):
            base.copy_(span.pulled)
