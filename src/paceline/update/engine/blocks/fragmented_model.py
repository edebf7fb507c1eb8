# SPDX-License-Identifier: Apache-2.0
"""A model in fragments, whose blocks are exchanged in turn.

Exchange k is of fragment `k mod F`, so a worker that has run out of data knows which fragment is next and can join.
Several exchanges may be in flight.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.core.flat import Fragment, Modules
from paceline.core.optimizer_state import Owned
from paceline.core.shards import Shards, reshard
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.buffers import BufferState
from paceline.update.engine.blocks.fragment_schedule import FragmentSchedule
from paceline.update.engine.blocks.fragments import staggered
from paceline.update.engine.blocks.outer_state import OuterState, ParameterState
from paceline.update.engine.blocks.update import BlockUpdate
from paceline.update.engine.settings import Settings
from paceline.update.exchange.checksum import combine
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeHeader, ExchangeSummary
from paceline.update.exchange.kind import NO_PAYLOAD, ExchangeKind
from paceline.update.exchange.work import LocalWork


class FragmentedModel:
    """All fragments of a model under a block rule.

    Args:
        rule: the rule.
        exchanger: the connection.
        model: the user's modules; their buffers belong to the first fragment.
        owned: (optimizer, its named parameters) pairs.
        settings: of the run.
        workers: N, as the rule counts them.

    Attributes:
        updates: of each fragment.
        schedule: the fragment schedule.
        entered: of each fragment, this worker's minibatches up to the end of its last block, whose exchange may be in
            flight.
    """

    def __init__(
        self, rule: Rule, exchanger: Exchanger, model: Modules, owned: Owned, settings: Settings, workers: int
    ) -> None:
        self._rule_schedule, self._model = rule.blocks, model
        self._shards = Shards(parameter for _, named in owned for _, parameter in named)
        self.updates = [
            BlockUpdate(rule, exchanger, None if number else model, part, settings, ExchangeKind.block(number), workers)
            for number, part in enumerate(staggered(owned, rule.schedule.fragments))
        ]
        for update in self.updates:
            update.shards = self._shards
        self.schedule = FragmentSchedule([0] * len(self.updates))
        self.entered = [0] * len(self.updates)
        self._landed: set[int] = set()

    # -- schedule ---------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The fragment of the next exchange."""
        return self.schedule.begun % len(self.updates)

    def landing(self) -> Iterator[int]:
        """The fragments whose exchange is due to land."""
        return (f for f, made in list(self.schedule.made.items()) if made >= self._rule_schedule.overlap)

    def due(self) -> bool:
        """Whether the next fragment's block is over."""
        return self.schedule.steps >= self.schedule.ends(self._rule_schedule)

    def requests_due(self, rests: bool) -> int | None:
        """The step after which workers gather tuning requests, if that is due, else None.

        It follows from the schedule alone, so it lies between the same two exchanges for workers that train and for one
        that `rests`: it makes no more steps, but joins every exchange.
        """
        schedule = self.schedule
        now = schedule.ends(self._rule_schedule) if rests else schedule.steps
        return schedule.requests.pop(0) if schedule.requests and now >= schedule.requests[0] else None

    def retune(self, rule: Rule, now: int) -> None:
        """Continue with other numbers of the rule from step `now` on."""
        self.schedule.retime(self._rule_schedule, rule.blocks, now)
        self._rule_schedule = rule.blocks
        for update in self.updates:
            update.retune(rule)

    def release(self) -> None:
        """Remove the hooks of the optimizers."""
        for update in self.updates:
            update.optimizers.release()

    @property
    def coming(self) -> bool:
        """Whether an exchange is in flight, and the next step begins no other."""
        return bool(self.schedule.made) and self.schedule.steps + 1 < self._rule_schedule.ends(self.schedule.begun)

    @property
    def quiet_steps(self) -> int:
        """How many of the next steps neither begin nor land an exchange, so that nothing reads the parameters."""
        schedule = self.schedule
        lands = [self._rule_schedule.overlap - made for made in schedule.made.values()]
        return max(0, min([schedule.ends(self._rule_schedule) - schedule.steps, *lands]) - 1)

    def begin(self, total: int, leaving: bool, idle: bool = False, waits: bool = False) -> None:
        """End the next fragment's block, and start its exchange.

        Args:
            total: this worker's minibatches since attach.
            leaving: whether the worker has finished its data.
            idle: whether another process of the host made the minibatches since the last exchange.
            waits: whether all workers merge, and wait for the result despite the rule's overlap.
        """
        fragment, schedule = self.next, self.schedule
        work = LocalWork(0 if idle else schedule.since[fragment], total, leaving=leaving, merges=waits)
        schedule.since[fragment] = 0
        schedule.begin(self._rule_schedule)
        self.entered[fragment] = total
        overlapped = self._rule_schedule.overlap > 0 and not (leaving or waits)
        self.updates[fragment].begin(work, overlapped)
        if overlapped:
            schedule.made[fragment] = 0
        if self.updates[fragment].left_out:
            self._restart_others(fragment)

    def stand(self, total: int) -> ExchangeSummary:
        """Join a block that another worker brings with what this one has made since the last one of its fragment.

        Args:
            total: this worker's minibatches since attach.
        """
        fragment, schedule = self.next, self.schedule
        update = self.updates[fragment]
        update.begin(LocalWork(schedule.since[fragment], total, stands=True), overlapped=False)
        summary = update.land(None)
        schedule.since[fragment] = 0
        schedule.begin(self._rule_schedule)
        schedule.steps = schedule.at[-1]
        self.entered[fragment] = total
        if update.left_out:
            self._restart_others(fragment)
        return summary

    def waiting_header(self, total: int) -> ExchangeHeader:
        """The header of a worker at the end of its pass, which joins an exchange if another worker brings one.

        Args:
            total: this worker's minibatches.
        """
        update, minibatches = self.updates[self.next], self.schedule.since[self.next]
        finite = not minibatches or update.state.finite()
        factor = minibatches / self._rule_schedule.period if finite else 0.0
        return ExchangeHeader(0, NO_PAYLOAD, False, False, finite, minibatches, 0.0, factor, total, 0)

    def uncount(self, at: list[int]) -> None:
        """The exchange that was begun last is none: no worker brought anything, and some will later.

        Args:
            at: of the schedule, before.
        """
        self.schedule.begun, self.schedule.at = self.schedule.begun - 1, at

    def _restart_others(self, fragment: int) -> None:
        """A bad contribution to one fragment invalidates the worker's other fragments; restart them too."""
        for other, update in enumerate(self.updates):
            if other == fragment:
                continue
            if other in self.schedule.made:
                self.land(other)
            update.restart()
            self.schedule.since[other] = 0

    def land(self, fragment: int) -> ExchangeSummary:
        """Apply the exchange of a fragment that `begin` sent."""
        summary = self.updates[fragment].land(self.schedule.made.pop(fragment, None))
        if self._shards:
            reshard(self._model)
        self._landed.add(fragment)
        if summary.asked:
            self.schedule.add_request(fragment, self._rule_schedule.overlap)
        return summary

    def take_written(self) -> list[Fragment]:
        """The parameters that exchanges have written since the last call."""
        landed, self._landed = self._landed, set()
        return [state.fragment for k in landed for state in self.updates[k].state.parameters]

    def align(self, begun: int) -> None:
        """Set the number of exchanges begun; the next one is due after the same number of steps on every worker."""
        steps = self._rule_schedule.ends(begun - 1) if begun else 0
        self.schedule = FragmentSchedule(self.schedule.since, {}, begun, steps)

    def renumber(self, workers: int) -> None:
        """Adapt to a changed number of workers."""
        for update in self.updates:
            update.renumber(workers)

    # -- the global model -------------------------------------------------------------------------

    @property
    def steps_committed(self) -> int:
        """This worker's minibatches that are in all fragments of the global model."""
        return min(self.entered)

    @property
    def block(self) -> int:
        """Blocks that have been exchanged, of the fragment that has most."""
        return max(update.numbers.block for update in self.updates)

    @property
    def outer_states(self) -> list[OuterState]:
        """The outer states of all fragments."""
        return [state for update in self.updates for state in update.state.all]

    @property
    def moment_states(self) -> list[OuterState]:
        """The outer states of the moments."""
        return [state for update in self.updates for state in update.state.moments or []]

    def arrive(self) -> None:
        """Wait until the outer state has the results of all in-flight exchanges."""
        for update in self.updates:
            update.arrive()

    @property
    def global_parts(self) -> list[ParameterState | BufferState]:
        """The outer states that hold the global model; waits for in-flight exchanges."""
        self.arrive()
        return [
            *(state for update in self.updates for state in update.state.parameters),
            *(state for update in self.updates for state in update.state.buffers),
        ]

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> the global model's parameter or buffer, in the model's own dtype and shape; copies."""
        found: dict[str, Tensor] = {}
        for part in self.global_parts:
            found |= part.fragment.unflatten(part.exported)
        return found

    def prepare(self) -> None:
        """Create outer state that needs the optimizers' state."""
        for update in self.updates:
            update.prepare()

    def capture(self) -> None:
        """Take the present model and moments, the same on all workers, as the first block's start."""
        for update in self.updates:
            update.capture()

    def capture_moments(self) -> None:
        """Take the moments of attach, the same on all workers, as the first block's start."""
        for state in self.moment_states:
            state.capture()

    def checksum(self) -> int:
        """Checksum of the last exchanges' results."""
        return combine(torch.tensor(update.state.checksum()) for update in self.updates)

    @property
    def keeps_state(self) -> bool:
        """Whether optimizers keep state of their own from block to block."""
        choices = (choice for update in self.updates for choice in update.optimizers.choices)
        return any(choice not in ("compensate", "reset") for choice in choices)
