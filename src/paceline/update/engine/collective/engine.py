# SPDX-License-Identifier: Apache-2.0
"""The engine of workers that exchange together: gradients at every step, or blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint import ExchangePosition
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment
from paceline.core.optimizer_state import restore_beta1
from paceline.data.ledger.leases import Leases
from paceline.rules.rule import Rule
from paceline.update.engine import exit_handling
from paceline.update.engine.blocks import saved as saved_blocks
from paceline.update.engine.blocks.fragmented_model import FragmentedModel
from paceline.update.engine.collective.handover import Handover
from paceline.update.engine.collective.joining import end_pass, shut_down
from paceline.update.engine.collective.parts import assemble, blocks_of
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import stepping_scaler
from paceline.update.engine.gradients import saved as saved_gradients
from paceline.update.engine.gradients.update import GradientUpdate
from paceline.update.exchange.kind import WARMUP_END
from paceline_plugins.receipts.observer import GRADIENTS, plain_state


class Engine:
    """The steps of a run of several workers; an :class:`paceline.update.engine.protocol.EngineProtocol`.

    If the processes of a host are one worker (`within="host"`), gradients are exchanged inside each host, at every
    step, and blocks among all processes: those of a host contribute the same delta with equal weights, and each sends
    its share of the host's traffic over the slow links (:mod:`paceline.rules.topology.hierarchical`).

    Args:
        run: the context that the parts of the run share.
    """

    leases: Leases | None = None  # every worker computes all workers' parts of the data
    keeps_steps = True

    def __init__(self, run: RunContext) -> None:
        self._run, self._progress, self._parts = run, run.progress, assemble(run)
        run.tuner.follow = lambda rule: self._parts.retuning.follow(rule, self._steps_of_blocks)

    # -- position ---------------------------------------------------------------------------------

    @property
    def blocks(self) -> FragmentedModel | None:
        """The blocks, if the rule has any."""
        return self._parts.blocks.blocks if self._parts.blocks is not None else None

    @property
    def gradients(self) -> list[GradientUpdate]:
        """The exchanges of gradients, one of each optimizer."""
        return self._parts.gradients.updates

    @property
    def handover(self) -> Handover:
        """Gives workers the state of others."""
        return self._parts.handover

    @property
    def local(self) -> bool:
        """Whether gradients stay on this worker at present."""
        return self._parts.gradients.context.local

    @local.setter
    def local(self, now: bool) -> None:
        self._parts.gradients.context.local = now

    @property
    def gradients_due(self) -> bool:
        return self._parts.gradients.context.each_step

    @property
    def quiet_steps(self) -> int:
        """At how many of the next steps the engine neither reads nor writes the parameters."""
        return self.blocks.quiet_steps if self.blocks is not None and not self.gradients_due else 0

    @property
    def idle_steps(self) -> int:
        """At how many of the next steps the engine does nothing but count them."""
        return self.quiet_steps if self.blocks is not None and not self.blocks.schedule.requests else 0

    @property
    def exchanged(self) -> int:
        """Blocks that have been exchanged."""
        return self.blocks.block if self.blocks is not None else 0

    @property
    def steps_committed(self) -> int:
        blocks = self._parts.blocks
        return self._progress.steps if blocks is None or self._progress.lockstep else blocks.blocks.steps_committed

    @property
    def exchange_position(self) -> ExchangePosition:
        """Position in the exchanges."""
        blocks, host, one = self.blocks, self._parts.host, self._parts.exchanger
        if blocks is None or self._progress.lockstep:
            one = one if self._progress.lockstep or host is None else host
            return ExchangePosition(self._progress.exchanges, one.sequence, one.left, awaited=one.awaited)
        begun = self._parts.retuning.rule.schedule.warmup + blocks.schedule.begun
        return ExchangePosition(begun, one.sequence, one.left, blocks.coming, one.awaited)

    @property
    def global_model(self) -> FragmentedModel | None:
        """The blocks, if the user's model differs from the global one."""
        return None if self._progress.lockstep or self._parts.gradients.context.closed else self.blocks

    # -- at a step --------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Make sure that the gradients are the workers' mean."""
        tuner = self._run.tuner
        if tuner.measured.probing and stepping_scaler() is not None:
            tuner.end_probe("a GradScaler makes the steps")
        if tuner.measured.gave_up:
            self._parts.follow_choice()
        else:
            self._parts.gradients.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """The optimizer made a step, or skipped it."""
        if self._parts.gradients.updates:
            self._parts.gradients.after_step(optimizer)

    def on_step(self, warm: bool) -> None:
        parts, receipts = self._parts, self._run.receipts
        if receipts is not None and self._progress.lockstep:
            state = plain_state(self._run.owned, self._run.model)
            receipts.merged(GRADIENTS, parts.exchanger.sequence, state, None)
        if warm:
            parts.end_warmup(parts.exchanger.meet(parts.bare_header(WARMUP_END, leaving=False)))
        elif parts.blocks is not None and not self._progress.lockstep:
            parts.blocks.advance(idle=False)
        parts.retuning.apply(0)
        parts.follow_choice()

    def take_written(self) -> list[Fragment]:
        return self.blocks.take_written() if self.blocks is not None else []

    def retune(self) -> None:
        """Agree on the requested changes and apply them, between two exchanges."""
        self._parts.retuning.agree()
        self._parts.retuning.apply(self._steps_of_blocks)

    @property
    def _steps_of_blocks(self) -> int:
        """Steps since the first block began."""
        return self.blocks.schedule.steps if self.blocks is not None else 0

    def follow(self, rule: Rule) -> None:
        self._parts.follow(rule)

    # -- collective calls -------------------------------------------------------------------------

    def merge(self) -> None:
        """End the current block of every fragment, at any number of minibatches."""
        if self.global_model is not None and self._parts.blocks is not None:
            self._parts.blocks.merge()

    def end_pass(self) -> None:
        """A pass over shared data is over: wait until all workers are at its end, and hold the same."""
        if self._run.transport.world.size > 1:
            end_pass(self._parts)

    def shutdown(self) -> None:
        """End the run together: wait for workers that have more data, and merge the rest of the last block."""
        shut_down(self._parts)

    def close(self) -> None:
        """Remove the hooks, and end the background threads."""
        self._parts.gradients.context.closed = True
        if self.blocks is not None:
            self.blocks.release()
        exit_handling.release(self._run.owned)
        self._parts.gradients.stop()
        for exchanger in self._parts.exchangers:
            exchanger.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        self._parts.gradients.withdraw()
        found: dict[str, Any] = {
            "blocks": saved_blocks.save(self.blocks) if self.blocks is not None else [],
            "gradients": [saved_gradients.save(update) for update in self.gradients],
            "sequence": [exchanger.sequence for exchanger in self._parts.exchangers],
        }
        if self._parts.missed:
            found["missed"] = self._parts.missed
        return found

    def load(self, state: dict[str, Any]) -> None:
        """Load a result of `state`; after the optimizers' own state."""
        self._parts.missed = state.get("missed", 0)
        if self.blocks is not None:
            saved_blocks.load(self.blocks, state["blocks"])
        self._parts.follow_progress()
        for update, row in zip(
            self.gradients, state["gradients"], strict=False
        ):  # a run that began with blocks has none
            saved_gradients.load(update, row)
        for exchanger, sequence in zip(self._parts.exchangers, state["sequence"], strict=True):
            exchanger.sequence = sequence

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check a checkpoint of another number of workers; returns a function that loads it.

        When it is called, the user's model must hold the global model, and the optimizers their new state.
        """
        tuner, parts = self._run.tuner, self._parts
        rule = tuner.measured.rule_of(old.part(0, "tuning", "choice"))
        warming = rule.schedule.warmup > 0 and not old.part(0, "flow", 1)  # blocks have not begun
        blocks = None if warming else self.blocks or blocks_of(self._run, rule, parts.exchanger)
        rows = saved_blocks.read(blocks, old) if blocks is not None else []
        if blocks is not None and blocks is not self.blocks:  # built to check the rows only
            blocks.release()
        sequence = int(old.part(0, "exchange", "sequence", 0) or 0)
        gradients = [
            {name: old.part(0, "exchange", "gradients", k, name) for name in saved_gradients.RESHARDED}
            for k in range(len(self._run.owned))
        ]

        def put() -> None:
            if self.blocks is not None:
                saved_blocks.reshard(self.blocks, rows)
            else:
                for optimizer, _ in self._run.owned:
                    restore_beta1(optimizer)
            self._parts.follow_progress()
            for update, row in zip(self.gradients, gradients, strict=False):
                if row["order"] is not None:
                    saved_gradients.reshard(update, row)
            self._parts.exchanger.sequence = sequence

        return put
