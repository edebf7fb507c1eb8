# SPDX-License-Identifier: Apache-2.0
"""Which of a run's N workers train, where their number grows; all N are there from the start.

Workers 0 .. k-1 train. The others stand in `run.share` and join every exchange with nothing, so they hold the same
global model and outer state. After an exchange all N have counted the same blocks and minibatches, and the headers have
told all of them how many workers the k are worth: all decide alike when k changes
(:mod:`paceline.rules.schedule.growth`). It does where those that train ask for their next batch
(:mod:`paceline.data.sharing.turns`); there the workers that begin take over what the others have beside the global
model: the optimizer's settings and, where workers keep it from block to block, its state, and the included objects.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.errors import OverError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine import exit_handling
from paceline.update.engine.blocks.exchanges import BlockExchanges
from paceline.update.engine.collective.handover import Handover
from paceline.update.engine.context import RunContext
from paceline.update.exchange.header import ExchangeSummary

OVER = "the workers that train have ended while this one waited for its turn"


class GrowingWorkers:
    """One worker's view of a number of workers that grows; :class:`paceline.data.sharing.turns.TrainingWorkers`.

    Args:
        run: the context that the parts of the run share.
        blocks: the block exchanges.
        handover: gives workers that begin the state of others.

    Attributes:
        workers: k, at present.
        coming: k of the next batches, if it is to change; else k.
        blocks: the block exchanges.
        close: ends this worker's part of the run.
    """

    def __init__(self, run: RunContext, blocks: BlockExchanges, handover: Handover) -> None:
        self._run, self.blocks, self.handover, world = run, blocks, handover, run.transport.world
        growth = run.rule.schedule.grow
        assert growth is not None
        self._growth, self.most, self.rank = growth, world.size, world.rank
        self.workers = self.coming = first_workers(run.rule, world.size)
        self.minibatches = self._made = 0
        self._known_decays: list[Any] | None = None
        self.close: Callable[[], None] = lambda: None
        blocks.landed = self.landed

    # -- how many ---------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """Whether a worker waits."""
        return self.workers < self.most

    @property
    def changes(self) -> bool:
        """Whether k changes before the next batch."""
        return self.coming != self.workers

    @property
    def waits(self) -> bool:
        """Whether this worker waits for its turn."""
        return self.rank >= self.workers

    @property
    def trains(self) -> bool:
        """Whether the program trains, judged by gradients and by the mode of its model."""
        return self._run.trains

    def landed(self, summary: ExchangeSummary) -> None:
        """A block was exchanged: count it, and decide whether k grows."""
        if not summary.weight:
            return
        self._made, self.minibatches = self._made + 1, self.minibatches + sum(summary.minibatches)
        ends = any(header.leaving for header in summary.headers)
        if self.active and not self.changes and not ends:
            worth = self.blocks.blocks.updates[0].numbers.diversity.effective or 1.0
            self.coming = self._growth.next(self.workers, self.most, worth, self._made, self.minibatches)

    def stepped(self, in_turn: bool) -> None:
        """The optimizer made a step, of a batch that was dealt to the workers that train if `in_turn`.

        Raises:
            UnsupportedError: it was not, while other workers wait for their turn, or the moments of the optimizer decay
                otherwise than there.
        """
        if not self.active:
            return
        world, rule = self._run.transport.world, self._run.rule.text()
        decays = self._decays()  # read within a step: a schedule may leave others between two
        if self._known_decays is None:
            self._known_decays = decays
        if decays != self._known_decays:
            raise UnsupportedError(
                world.sign(
                    f"{rule}: the betas of the optimizer have changed, and the workers that wait for their turn do not "
                    "know of it; leave them as they are (cycle_momentum=False for OneCycleLR and CyclicLR), or leave "
                    "grow out"
                )
            )
        if self.waits or not in_turn:
            raise UnsupportedError(
                world.sign(
                    f"{rule}: {self.workers} of {self.most} workers train now, and the others wait in run.share for "
                    "their turn, but this step was made outside of a pass over run.share that began with gradients on "
                    "and a model in training mode (model.train()); train on run.share(loader), or leave grow out"
                )
            )

    def _decays(self) -> list[Any]:
        """b of the moments that blocks compensate."""
        optimizers = self.blocks.blocks.updates[0].optimizers
        return [
            group.get("betas", group.get("momentum"))
            for _, choice, optimizer, _ in optimizers
            for group in (optimizer.param_groups if choice == "compensate" else ())
        ]

    # -- together ---------------------------------------------------------------------------------

    def stand(self, said: Any) -> list[Any] | None:
        """Join the next exchange; what every worker said, in rank order, if all stand, None if a block was exchanged.

        Raises:
            SystemExit: all workers that train have ended, so there is nothing left to do.
        """
        summary = self.blocks.stand()
        if self.waits:
            self._run.progress.steps = summary.headers[0].total
            if all(header.leaving for header in summary.headers[: self.workers]):
                self.close()
                exit_handling.exit_after_end(OverError(self._run.transport.world.sign(OVER)))
        if not summary.all_stand:
            return None
        return self._run.transport.gather_json(said)

    def change(self) -> None:
        """Continue with the next number of workers; those that begin take over the others' state."""
        before = self.workers
        self._hand_over(before, self.coming)
        self._use(self.coming)
        self._made = 0
        run, factor = self._run, self._run.rule.rate_factor(self.workers)
        run.monitor.note(
            "stage", workers=self.workers, of=self.most, minibatches=self.minibatches, rate_factor=round(factor, 6)
        )

    def _use(self, workers: int) -> None:
        self.workers = self.coming = workers
        for update in self.blocks.blocks.updates:
            update.renumber(workers)
        self._follow()

    def _follow(self) -> None:
        """Give the learning rates the factor of k workers."""
        self._known_decays = None
        self._run.tuner.count(self.workers)
        self._run.tuner.measured.follow_workers()

    def _hand_over(self, before: int, after: int) -> None:
        """Worker j that begins takes worker 0's settings and included objects, and the optimizer's state of j mod k."""
        of_blocks, begins = self.blocks.blocks.keeps_state, before <= self.rank < after
        self.handover.give(0, begins, state=False)
        for source in range(min(before, after - before) if of_blocks else 0):
            self.handover.give(source, begins and self.rank % before == source, settings=False)

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, int]:
        """State for a checkpoint."""
        return {
            "workers": self.workers,
            "coming": self.coming,
            "minibatches": self.minibatches,
            "made": self._made,
        }

    def load(self, state: dict[str, int] | None) -> None:
        """Restore `state`, also of another number of workers; None begins anew. Before the blocks' own state."""
        if state is not None:
            self.workers = min(state["workers"], self.most)
            self.coming = max(self.workers, min(state["coming"], self.most))
            self.minibatches, self._made = state["minibatches"], state["made"]
        for update in self.blocks.blocks.updates:
            update.numbers.workers = self.workers
        self._follow()


def first_workers(rule: Rule, most: int) -> int:
    """How many of `most` workers train in the first blocks."""
    grow = rule.schedule.grow
    return most if grow is None else min(grow.first, most)
