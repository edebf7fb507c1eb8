# SPDX-License-Identifier: Apache-2.0
"""The engine of an elastic run: carries out a block rule among workers that join and leave."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.optim import Optimizer

from paceline.checkpoint import ExchangePosition
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Fragment, exchanged_parts
from paceline.core.world import World
from paceline.errors import CheckpointError
from paceline.flow.commit import CommittingExchanger, ControlLedgerClient, UncommittedPlaces
from paceline.flow.joining import Donor, Joining
from paceline.flow.leaving import Leaving
from paceline.flow.membership import CommitReport, ElasticMembership
from paceline.flow.wanted import WantedWorkers
from paceline.rules.rule import Rule
from paceline.update.engine import exit_handling, global_model
from paceline.update.engine.agreement import untrained
from paceline.update.engine.blocks import saved
from paceline.update.engine.blocks.model import FragmentedModel
from paceline.update.engine.context import RunContext
from paceline.update.exchange.exchanger import ExchangeSummary


class ElasticEngine:
    """The steps of a worker in an elastic run; a :class:`paceline.update.engine.protocol.EngineProtocol`."""

    gradients_due = False

    def __init__(
        self,
        run: RunContext,
        membership: ElasticMembership,
        # gives the state and the global model for joining workers that hold the frozen tensors of these keys
        given: Callable[[dict[str, str]], tuple[dict[str, Any], dict[str, Any]]],
        frozen_keys: Callable[[], dict[str, str]],
    ) -> None:
        model, owned = run.model, run.owned
        self._run, self.rule, self.membership = run, run.rule, membership
        self.local = self._closed = False
        self._uncommitted = UncommittedPlaces()
        self.wanted = WantedWorkers(self.rule, membership.control.most)  # how many members the run wants
        self._fragment = 0  # of the exchange that is under way
        self._quiet = 0  # exchanges in a row in which all members had come to their end
        self._donor = Donor(membership, run.monitor, given, frozen_keys)
        self.leases = ControlLedgerClient(membership.control, self._join_exchange, lambda: membership.applied)
        self._exchanger = CommittingExchanger(membership, self.rule, run.tuner, self._report)
        membership.on_connect.append(self._exchanger.renew)
        # gets the state of the run
        self.joining = Joining(membership, owned, exchanged_parts(model, owned), untrained(model, owned), frozen_keys)
        self.leaving = Leaving(membership, lambda: self.joining.settled)  # lets this worker leave before the end
        run.loaders.among_members(self.joining.ready, self.leave_if_asked)
        membership.enter()
        exit_handling.claim(membership.transport, owned)
        self.joining.start()
        # all fragments of the model
        self.blocks = FragmentedModel(self.rule, self._exchanger, run, membership.transport.world.size)
        self.blocks.capture_moments()
        self.joining.blocks, self.joining.wanted = self.blocks, lambda: self.wanted.number
        membership.on_connect.append(self._renumber)
        self._take_note()

    def keep_local(self, now: bool) -> None:
        self.local = now

    # -- members ----------------------------------------------------------------------------------

    def _renumber(self) -> None:
        """The members have changed; in the training thread."""
        self.blocks.renumber(self.membership.transport.world.size)
        self._take_note()

    def _take_note(self) -> None:
        """Adopt the present members; the donor sends its state to joining workers."""
        run, world, generation = self._run, self.membership.transport.world, self.membership.generation
        run.tuner.among(world)
        self.wanted.renumber(world.size, generation.wanted)
        factor = self.wanted.rate_factor
        # the loaders lease data even while the first worker is alone
        run.loaders.move_to(
            World(world.rank, max(2, world.size), world.local_rank, world.local_size, world.host, world.hosts)
        )
        rate = {"rate_factor": round(factor, 6)} if factor != 1 else {}
        run.monitor.note("generation", number=generation.number, size=world.size, reason=generation.reason, **rate)
        self._donor.give()

    # -- progress ---------------------------------------------------------------------------------

    @property
    def exchanged(self) -> int:
        """Blocks that have been exchanged."""
        return self.blocks.block

    @property
    def steps_committed(self) -> int:
        """How many of this worker's minibatches, from the first, are in the global model."""
        return self.blocks.steps_committed

    @property
    def global_model(self) -> FragmentedModel | None:
        """The blocks: the user's model differs from the global one."""
        return None if self._closed else self.blocks

    @property
    def exchange_position(self) -> ExchangePosition:
        """Position in the exchanges."""
        return ExchangePosition(self.membership.applied, self.membership.applied)

    @property
    def keeps_steps(self) -> bool:
        """Only rank 0 writes them: all members hold the same state."""
        return self.membership.rank == 0

    # -- steps ------------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Does nothing."""

    def after_step(self, optimizer: Optimizer) -> None:
        """Refuse to train a model that is not the run's."""
        self.joining.ready()

    def on_step(self, warm: bool) -> None:
        """A minibatch was counted: end the block if it is over, or if other members wait for this worker."""
        marks, steps = self._run.loaders.take_marks(), self._run.progress.steps
        if marks:
            self._uncommitted.add(steps, marks)
        self.membership.control.doing("computing", steps)
        self.membership.follow_control()
        self.blocks.schedule.stepped()
        if self.blocks.due() or self.membership.called:
            self._end_block(leaving=False)

    def take_written(self) -> list[Fragment]:
        return self.blocks.take_written()

    def _join_exchange(self) -> None:
        """This worker has no data: join the exchange at which other members wait for it, if any."""
        steps = self._run.progress.steps
        self.membership.control.doing("waiting for data", steps)
        self.membership.follow_control()
        if self.membership.called:
            # minibatches accumulated for a step that the end of the epoch left incomplete
            self._uncommitted.add(steps, self._run.loaders.take_marks())
            self._end_block(leaving=False)
        self.leave_if_asked()

    def leave_if_asked(self) -> None:
        """Where an iteration of the program's loop is over: if this worker is to leave, commit its work and leave."""
        if not self.leaving.asked:
            return
        end_block = partial(self._end_block, leaving=False)
        while self._run.progress.steps > self.blocks.steps_committed:
            end_block()
        self.leaving.leave(end_block)

    def _end_block(self, leaving: bool) -> ExchangeSummary:
        self.joining.ready()
        membership, blocks, tuner, steps = self.membership, self.blocks, self._run.tuner, self._run.progress.steps
        membership.follow_control()
        fragment = self._fragment = blocks.next
        self._run.monitor.begin()
        membership.control.doing(f"exchange {membership.exchange}", steps)
        blocks.begin(steps, leaving)
        try:
            summary = blocks.land(fragment)
            self.wanted.advance(summary, fragment)
            self._quiet = self._quiet + 1 if summary.all_leaving else 0
            self._uncommitted.drop(blocks.steps_committed)
            if tuner.decided:  # among the members that agreed, and before joining workers get the state
                tuner.apply()
                self.follow(tuner.rule)
        finally:
            if membership.applying.locked() and membership.follows is not None:
                membership.applying.release()
            if not self._over:  # else members that are gone already would be missed
                membership.take_over()
            self.wanted.renumber(membership.transport.world.size, membership.generation.wanted)
        effective = blocks.updates[fragment].numbers.diversity.effective
        timing = self._exchanger.timing
        self._run.monitor.end(timing, summary, block=blocks.block, warmup=False, effective=effective)
        blocks.align(blocks.schedule.begun)
        membership.control.doing("computing", steps)
        return summary

    def _report(self, summary: ExchangeSummary) -> CommitReport:
        """What this exchange reports to the control plane."""
        own = summary.headers[self.membership.transport.world.rank]
        marks, returned, facts = self._uncommitted.of_exchange(own, self.blocks.steps_committed)
        wanted, effective = self.wanted.after(summary, self.blocks, self._fragment)
        facts |= {"effective": round(effective, 3), "sent": self._exchanger.sent}
        return CommitReport(marks, returned, facts | {"wire_s": round(self._exchanger.wire_s, 4)}, wanted)

    def retune(self) -> None:
        """Does nothing: changes take effect with the next commit."""

    def follow(self, rule: Rule) -> None:
        """Continue with changed settings of the rule."""
        self._exchanger.follow(rule)
        if rule is not self.rule:
            self.blocks.retune(rule, self.blocks.schedule.steps)
        self.rule = rule

    retuned = follow  # there is no other change

    def merge(self) -> None:
        """End the current block; members that train on are called and join the exchange."""
        for _ in self.blocks.updates:
            self._end_block(leaving=False)

    @property
    def _over(self) -> bool:
        """Whether no member had more data in so many exchanges that the last one has compared all of the state."""
        return self._quiet > len(self.blocks.updates)

    def shutdown(self) -> None:
        """End the run together: keep joining exchanges until no member has more data."""
        self.leases.done(self._run.loaders.take_marks())  # such as validation batches
        while not self._over:
            self._end_block(leaving=True)
            if not self._over:
                self.leave_if_asked()
        global_model.settle(self._run.model, self.blocks.global_parts)
        self.membership.control.leave()

    def close(self) -> None:
        """Release all resources."""
        self._closed = True
        self.leaving.close()
        exit_handling.release(self._run.owned)
        self._exchanger.close()
        self.membership.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The engine's state for a checkpoint."""
        own = {"wanted": self.wanted.state()} if self.rule.schedule.grow is not None else {}
        return {"blocks": saved.save(self.blocks), "gradients": [], "sequence": [self._exchanger.sequence], **own}

    def load(self, state: dict[str, Any]) -> None:
        """Never called: the members may differ from those that saved, so `reshard` is used."""
        raise CheckpointError("an elastic run resumes as another number of workers does")

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        """Read and check a checkpoint, or the state that a live worker sent; returns a function that loads it."""
        rows, wanted = saved.read(self.blocks, old), old.part(0, "exchange", "wanted")
        joins = self.joining.given is not None and old is self.joining.given

        def put() -> None:
            self.wanted.load(wanted)
            (saved.join if joins else saved.reshard)(self.blocks, rows)

        return put
