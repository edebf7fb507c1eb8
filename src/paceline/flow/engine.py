# SPDX-License-Identifier: Apache-2.0
"""Carries out a block rule among workers that come and go."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint import Moment
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication.base import Pending
from paceline.core.flat import Modules
from paceline.core.optimizer_state import Owned
from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import Mark
from paceline.errors import CheckpointError, PacelineError, PeerLostError, UnsupportedError
from paceline.flow.joining import Entering
from paceline.flow.ledger_client import LiveLeases
from paceline.flow.membership import Live
from paceline.flow.state_transfer import Parcel
from paceline.rules.rule import Rule
from paceline.update.engine import agreement, exit_handling, global_model
from paceline.update.engine.blocks import saved
from paceline.update.engine.blocks.schedule import Blocks
from paceline.update.engine.common_start import exchanged_parts, layout, untrained
from paceline.update.engine.context import RunContext
from paceline.update.engine.settings import Settings
from paceline.update.exchange.header import ExchangeSummary

logger = logging.getLogger("paceline")
LOOK_AGAIN_S = 0.02
"""How long a worker that is to save waits for its training thread to apply an exchange that counts."""


def check_rule(rule: Rule) -> None:
    """Refuse rules whose workers cannot come and go."""
    schedule = rule.schedule
    wrong = ""
    if not schedule.can_be_elastic:
        wrong = "exchanges no blocks; asynchronous rules survive losses by themselves, others are started again"
    elif schedule.overlap or schedule.warmup or rule.within:
        wrong = "has overlap, a warm-up or one worker for each host, which are not served where workers come and go"
    if wrong:
        raise UnsupportedError(f"an elastic run needs a block rule such as bmuf(period=16), and {rule.text()} {wrong}")


def fingerprint(rule: Rule, model: Modules, owned: Owned, settings: Settings) -> dict[str, Any]:
    """What has to be the same on all workers, in JSON's terms."""
    rows = [row for part in exchanged_parts(model, owned) for row in part.layout()] + layout(untrained(model, owned))
    about = agreement.about_optimizers(owned)
    del about["optimizer state at attach"]  # a newcomer is given it
    about["guard"] = str(settings.guard)
    found = {"rule": rule.text(), "seed": settings.seed, "outer_state": settings.outer_state, **about}
    numbers = sum(p.numel() for _, named in owned for _, p in named)
    digest = hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]
    return {**found, "tensors": len(rows), "numbers": numbers, "model": digest}


class Elastic:
    """What a worker of an elastic run does at its steps; a :class:`paceline.update.engine.protocol.EngineProtocol`.

    Args:
        context: what the parts of the run share; its rule is a block rule.
        live: this worker's membership.
        whole: gives this worker's state and the global model, as a checkpoint has them.

    Attributes:
        entering: how this worker comes by the state of the run.
    """

    def __init__(
        self, context: RunContext, live: Live, whole: Callable[[], tuple[dict[str, Any], dict[str, Any]]]
    ) -> None:
        rule, model, owned, settings = context.rule, context.model, context.owned, context.settings
        self.rule, self._live, self._model, self._owned = rule, live, model, owned
        self._flow, self._watch, self._feed = context.progress, context.monitor, context.loaders
        self._tuner, self._whole = context.tuner, whole
        self.local = self.closed = False
        self._on_their_way: list[Pending] = []
        self._fresh: deque[tuple[int, list[Mark]]] = deque()  # step -> places whose work is not in the global model
        self._leases = LiveLeases(live.member, self._join, lambda: live.applied)
        live.exchanger.marks, live.exchanger.tuner = self._marks, self._tuner
        self._tuner.follow = self.follow
        self.entering = Entering(live, owned, exchanged_parts(model, owned), untrained(model, owned))
        live.enter()
        exit_handling.claim(live.transport, owned)
        self.entering.start()
        self.blocks = Blocks(rule, live.exchanger, model, owned, settings, live.transport.world.size)
        self.blocks.capture_moments()
        self.entering.blocks, self._feed.ready = self.blocks, self.entering.ready
        live.moved = self._moved
        self._moved(note=False)

    # -- who is here ------------------------------------------------------------------------------

    def _moved(self, note: bool = True) -> None:
        """The members have changed; in the training thread."""
        live = self._live
        world, generation = live.transport.world, live.generation
        self._tuner.among(world)
        # what is leased is leased from the first worker on, though it may be alone for a time
        self._feed.world = World(
            world.rank, max(2, world.size), world.local_rank, world.local_size, world.host, world.hosts
        )
        if note:
            self.blocks.renumber(world.size)
        self._watch.note("generation", number=generation.number, size=world.size, reason=generation.reason)
        self._give()

    def _give(self) -> None:
        """Give newcomers what they begin with, where that is this worker's turn; it is sent in the background."""
        live, generation = self._live, self._live.generation
        if generation.donor != live.member.worker or not generation.newcomers:
            return
        parcel = Parcel(*self._whole())
        self._on_their_way = []
        for worker in sorted(generation.newcomers):
            try:
                self._on_their_way += parcel.give(live.transport, live.rank_of(worker))
            except PeerLostError:
                return  # the members will change again
        self._watch.note("gave", workers=sorted(generation.newcomers), bytes=parcel.nbytes)

    def _keep_up(self) -> None:
        """Between exchanges: go by the present members."""
        if self._live.outdated:
            self._live.renew(self._live.member.generation)

    # -- what a driver is asked -------------------------------------------------------------------

    @property
    def hooks_gradients(self) -> bool:
        """Nothing is due before an optimizer's step."""
        return False

    @property
    def gradients_due(self) -> bool:
        """Gradients are never exchanged."""
        return False

    @property
    def exchanged(self) -> int:
        """Blocks that have been exchanged."""
        return self.blocks.block

    @property
    def steps_committed(self) -> int:
        """Minibatches of this worker whose work is in the global model: the first so many."""
        return self.blocks.steps_committed

    @property
    def leases(self) -> LiveLeases:
        """The way to the ledger of the data."""
        return self._leases

    @property
    def global_model(self) -> Blocks | None:
        """The blocks: the user's model differs from the global one."""
        return None if self.closed else self.blocks

    @property
    def moment(self) -> Moment:
        """Where the exchanges stand."""
        return Moment(self._live.applied, self._live.applied)

    @property
    def keeps_steps(self) -> bool:
        """Only the first worker does: all hold the same."""
        return self._live.rank == 0

    def on_pause(self, save: Callable[[], None]) -> None:
        """`save` is called, in a thread of its own, when the run waits for workers and this one is to save it."""
        live = self._live

        def keep() -> None:
            done = False
            while live.member.paused and not done:
                with live.applying:
                    done = live.exact  # else an exchange counts already, and the training thread is about to apply it
                    if done and live.member.paused:
                        save()
                if not done:
                    time.sleep(LOOK_AGAIN_S)

        def keep_or_say() -> None:
            try:
                keep()
            except PacelineError as error:
                logger.warning("%s: no step was written while the run waits for workers", error)

        def heard(why: str) -> None:
            self._watch.note("paused", reason=why)
            if why and live.member.saves:
                threading.Thread(target=keep_or_say, name="paceline-pause", daemon=True).start()

        live.member.on_pause(heard)

    def before_step(self, optimizer: Optimizer) -> None:
        """Nothing."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Refuse to train a model that is not the run's."""
        self.entering.ready()

    # -- over time --------------------------------------------------------------------------------

    def on_step(self, warm: bool) -> None:
        """A minibatch was counted: end the block where it is over, or where the others wait for this worker."""
        marks = self._feed.take_marks()
        if marks:
            self._fresh.append((self._flow.steps, marks))
        self._live.member.doing("computing", self._flow.steps)
        self._keep_up()
        self.blocks.schedule.stepped()
        if self.blocks.due() or self._live.called:
            self._end_block(leaving=False)

    def _join(self) -> None:
        """There is nothing to do: come to the others' exchange, where they wait for this worker."""
        self._live.member.doing("waiting for data", self._flow.steps)
        self._keep_up()
        if self._live.called:
            # minibatches that were gathered for a step which the end of the epoch leaves incomplete
            self._fresh.append((self._flow.steps, self._feed.take_marks()))
            self._end_block(leaving=False)

    def _end_block(self, leaving: bool) -> ExchangeSummary:
        self.entering.ready()
        if not leaving:
            agreement.check_unchanged(self._owned)
        live, blocks = self._live, self.blocks
        self._keep_up()
        fragment = blocks.next
        self._watch.begin()
        live.member.doing(f"exchange {live.exchange}", self._flow.steps)
        blocks.begin(self._flow.steps, leaving)
        try:
            summary = blocks.land(fragment)
            while self._fresh and self._fresh[0][0] <= blocks.steps_committed:
                self._fresh.popleft()
            if self._tuner.decided:  # among those who agreed on it, and before newcomers are given the state
                self._tuner.apply()
                self.follow(self._tuner.rule)
        finally:
            if live.applying.locked() and live.follows is not None:
                live.applying.release()
            live.take_over()
        self._watch.end(live.exchanger.timing, summary, block=blocks.block, warmup=False)
        blocks.align(blocks.schedule.begun)
        live.member.doing("computing", self._flow.steps)
        return summary

    def _marks(self, summary: ExchangeSummary) -> tuple[list[Mark], list[Mark], dict[str, Any]]:
        """The places whose work enters the global model with this exchange; what was left out goes to somebody else."""
        own = summary.headers[self._live.transport.world.rank]
        merged: list[Mark] = []
        for steps, marks in self._fresh:
            if steps <= self.blocks.steps_committed:
                merged += marks
        facts = {"minibatches": own.minibatches, "total": own.total}
        return ([], merged, facts) if own.brings and own.factor == 0 else (merged, [], facts)

    def follow(self, rule: Rule, now: int = 0) -> None:
        """Go on with other numbers of the rule."""
        if rule is not self.rule:
            self.blocks.retune(rule, self.blocks.schedule.steps)
        self.rule = rule

    def merge(self) -> None:
        """End the block that is under way; those who go on come to the exchange as when they are called."""
        for _ in self.blocks.updates:
            self._end_block(leaving=False)

    def shutdown(self) -> None:
        """Come to the end together: go to the others' exchanges until nobody has more data."""
        self._leases.done(self._feed.take_marks())  # such as batches of a validation
        quiet = 0
        while quiet < len(self.blocks.updates) + 1:  # the last one compares what the one before it left
            summary = self._end_block(leaving=True)
            quiet = quiet + 1 if summary.all_leaving else 0
        global_model.settle(self.blocks.global_parts)
        self._live.member.leave()

    def close(self) -> None:
        """Let everything go."""
        self.closed = True
        exit_handling.release(self._owned)
        self._live.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds."""
        return {"blocks": saved.save(self.blocks), "gradients": [], "sequence": [self._live.exchanger.sequence]}

    def load(self, state: dict[str, Any]) -> None:
        """Never asked: the members of now are others than those of then, and `regroup` is."""
        raise CheckpointError("an elastic run resumes as another number of workers does")

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check what was saved, or given by one that lives; what is returned puts it in its place."""
        rows = saved.read(self.blocks, old)
        if self.entering.given is not None and old is self.entering.given:
            return lambda: saved.join(self.blocks, rows)
        return lambda: saved.reshard(self.blocks, rows)
