# SPDX-License-Identifier: Apache-2.0
"""A storm over whole elastic runs: `attach`, shared data, exchanges over rings, and a model that counts its samples.

Some of the runs keep checkpoint steps, and go on from them when all workers are gone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from devtools.storm.counting import Count, Counting, times
from devtools.storm.elastic import TIMEOUT_S, ElasticStorm
from devtools.storm.run_steps import PLACE, RUN_STEP_KINDS, drawn
from devtools.world.disk import SimDisk
from torch.utils.data import DataLoader

from paceline.core import runtime
from paceline.errors import CheckpointError, PacelineError
from paceline.rules.recipes import rule_from_text
from paceline.run.run import Run
from paceline.update.engine.settings import Settings

EXCHANGES = 200
"""Columns of the model."""
RULES = ("averaging(period=2)", "averaging(period=4)", "averaging(period=2, reproducible=True)")
"""Without fragments, which the model cannot count."""
STEP_S = (0.01, 0.4)
"""Seconds of a minibatch."""


class TrainingStorm(ElasticStorm):
    """Members with models of torch."""

    def prepare(self) -> None:
        rng = self.world.rng
        self.samples, self.epochs, self.rule = rng.randint(12, 40), rng.choice([1, 1, 2]), rng.choice(RULES)
        self.rule = self.settings.rule or self.rule
        self.ended: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.steps = drawn(self.seed, self.world, self.problems, self.settings.faults)
        if self.steps is not None:
            self.hosts_disk, self.kinds = self.steps.disk, RUN_STEP_KINDS

    @property
    def disks(self) -> list[SimDisk]:
        """Those with steps."""
        return [self.steps.disk] if self.steps is not None else []

    def damaged(self, why: str) -> None:
        """A bit of this file has flipped."""
        if self.steps is not None:
            self.steps.checks.flipped(why)

    def ends_the_run(self, error: BaseException | None) -> bool:
        lost = isinstance(error, CheckpointError) and self.steps is not None
        return super().ends_the_run(error) and not lost  # the user takes damaged steps away, and starts again

    def program(self, done: Callable[[BaseException | None], None]) -> Callable[[], None]:
        def main() -> None:
            try:
                self._train()
            except PacelineError as error:
                done(error)
                raise
            done(None)

        return main

    def begun(self, run: Run) -> None:
        """A worker has attached."""

    def stepped(self, ids: torch.Tensor, epoch: int) -> None:
        """A worker has trained on these samples."""

    def _train(self) -> None:
        low, high = STEP_S
        rng = self.world.rng
        model = Counting(self.samples, self.epochs, EXCHANGES)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        address, port = self.place
        steps = self.steps
        settings = Settings(control=f"{address}:{port}", timeout_s=TIMEOUT_S)
        if steps is not None:
            settings = replace(settings, checkpoint=PLACE, every_blocks=steps.every, keep=steps.keep)
        with Run(model, optimizer, rule_from_text(self.rule), settings) as run:
            members = run._parts.membership
            assert members is not None
            worker = members.control.worker
            if steps is not None:
                steps.checks.watch(run, steps.disk)
                steps.resume(run, f"worker {worker}", model)
            self.begun(run)
            seen = run.blocks
            share = run.share(DataLoader(list(range(self.samples)), 1, shuffle=True))  # type: ignore[arg-type]
            for epoch in range(run.epoch, self.epochs):
                for ids in share:
                    if steps is not None and run.blocks != seen:
                        seen = run.blocks
                        full = bool(self.faults.counts["full_disk"])
                        steps.exchanged(f"worker {worker}", seen, model, full)
                    runtime.sleep(low + (high - low) * rng.random())
                    model.count(ids, epoch, worker, run.blocks)
                    optimizer.step()
                    self.stepped(ids, epoch)
            self.exchanges = max(self.exchanges, run.blocks)
        self.ended[worker] = (model.entered.detach().clone(), model.shares.detach().clone())

    def check(self) -> None:
        states = list(self.ended.items())
        for worker, (entered, shares) in states:
            try:
                count = Count.of(times(entered, shares))
            except ValueError as error:
                self.problems.append(f"worker {worker}: {error}")
                continue
            for what, number in (("lost", count.lost), ("repeated", count.repeated)):
                if number:
                    self.problems.append(f"worker {worker} ends with {number} {what}")
        for worker, state in states[1:]:
            if any(not torch.equal(a, b) for a, b in zip(state, states[0][1], strict=True)):
                self.problems.append(f"workers {states[0][0]} and {worker} end with different models")
