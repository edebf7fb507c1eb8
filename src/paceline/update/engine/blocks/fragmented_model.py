# SPDX-License-Identifier: Apache-2.0
"""Block payloads over time: the fragments of a model take turns, and each lands when it is due.

Exchanges of all fragments form one sequence, fragment `number mod F`, so that a worker which has run out of data knows
which fragment comes next and can join it. Several may be under way at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from paceline.core.flat import Modules
from paceline.core.optimizer_state import Owned
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.buffers import BufferState
from paceline.update.engine.blocks.fragment_schedule import FragmentSchedule
from paceline.update.engine.blocks.fragments import staggered
from paceline.update.engine.blocks.outer_state import OuterState, ParameterState
from paceline.update.engine.blocks.update import BlockUpdate
from paceline.update.engine.settings import Settings
from paceline.update.exchange.checksum import combine
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeSummary
from paceline.update.exchange.kind import ExchangeKind
from paceline.update.exchange.work import LocalWork


class FragmentedModel:
    """All fragments of a model under a block rule.

    Args:
        rule: the rule.
        exchanger: the connection.
        model: the user's modules (their buffers go with the first fragment).
        owned: (optimizer, its named parameters) pairs.
        settings: of the run.
        workers: N, as the rule counts them.

    Attributes:
        updates: of each fragment.
        schedule: where the sequence of exchanges stands.
        entered: of each fragment, minibatches of this worker up to the end of its last block; its exchange may be under
            way, and will be in the global model.
    """

    def __init__(
        self, rule: Rule, exchanger: Exchanger, model: Modules, owned: Owned, settings: Settings, workers: int
    ) -> None:
        self._rule_schedule = rule.blocks
        self.updates = [
            BlockUpdate(rule, exchanger, None if number else model, part, settings, ExchangeKind.block(number), workers)
            for number, part in enumerate(staggered(owned, rule.schedule.fragments))
        ]
        self.schedule = FragmentSchedule([0] * len(self.updates))
        self.entered = [0] * len(self.updates)

    # -- over time --------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The fragment whose turn it is."""
        return self.schedule.begun % len(self.updates)

    def landing(self) -> Iterator[int]:
        """The fragments whose exchange has had its time."""
        return (f for f, made in list(self.schedule.made.items()) if made >= self._rule_schedule.overlap)

    def due(self) -> bool:
        """Whether the next fragment's block is over."""
        return self.schedule.steps >= self.schedule.ends(self._rule_schedule)

    def requests_due(self, rests: bool) -> int | None:
        """After which step the workers read their requests to one another, where the time for it has come.

        Between which two exchanges that is follows from the schedule alone, so that it is the same for workers that go
        on and for one that `rests`, which makes no steps any more but comes to every exchange.
        """
        schedule = self.schedule
        now = schedule.ends(self._rule_schedule) if rests else schedule.steps
        return schedule.asked.pop(0) if schedule.asked and now >= schedule.asked[0] else None

    def retune(self, rule: Rule, now: int) -> None:
        """Go on with other numbers of the rule from step `now` on."""
        self.schedule.retime(self._rule_schedule, rule.blocks, now)
        self._rule_schedule = rule.blocks
        for update in self.updates:
            update.retune(rule)

    @property
    def coming(self) -> bool:
        """Whether an exchange is under way, and the next step begins no other."""
        return bool(self.schedule.made) and self.schedule.steps + 1 < self._rule_schedule.ends(self.schedule.begun)

    @property
    def quiet(self) -> bool:
        """Whether the next step neither begins an exchange nor lands one, so that nothing reads the parameters."""
        schedule = self.schedule
        lands = any(made + 1 >= self._rule_schedule.overlap for made in schedule.made.values())
        return not lands and schedule.steps + 1 < schedule.ends(self._rule_schedule)

    def begin(self, total: int, leaving: bool, idle: bool = False, waits: bool = False) -> None:
        """End the block of the fragment whose turn it is; it lands at once, or later.

        Args:
            total: minibatches of this worker since attach.
            leaving: whether the worker has come to its end.
            idle: whether it made none of the minibatches since the last exchange itself.
            waits: whether all merge, and wait for the result whatever the rule's overlap.
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
        if summary.asked:
            self.schedule.hear(fragment, self._rule_schedule.overlap)
        return summary

    def align(self, begun: int) -> None:
        """So many exchanges have begun, and the next one is due after as many steps from now on every worker."""
        steps = self._rule_schedule.ends(begun - 1) if begun else 0
        self.schedule = FragmentSchedule(self.schedule.since, {}, begun, steps)

    def renumber(self, workers: int) -> None:
        """Workers have left or joined."""
        for update in self.updates:
            update.renumber(workers)

    # -- the global model -------------------------------------------------------------------------

    @property
    def steps_committed(self) -> int:
        """Minibatches of this worker whose work is in all fragments of the global model."""
        return min(self.entered)

    @property
    def block(self) -> int:
        """Blocks that have been exchanged, of the fragment that has most."""
        return max(update.numbers.block for update in self.updates)

    @property
    def outer_states(self) -> list[OuterState]:
        """Of all fragments."""
        return [state for update in self.updates for state in update.state.all]

    @property
    def moment_states(self) -> list[OuterState]:
        """Of the moments that were there at attach."""
        return [state for update in self.updates for state in update.state.moments or []]

    def arrive(self) -> None:
        """Wait until the outer state has the results of all exchanges under way."""
        for update in self.updates:
            update.arrive()

    @property
    def global_parts(self) -> list[ParameterState | BufferState]:
        """Those whose anchors are the global model, with every exchange that has begun; waits for them."""
        self.arrive()
        return [
            *(state for update in self.updates for state in update.state.parameters),
            *(state for update in self.updates for state in update.state.buffers),
        ]

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> the global model's parameter or buffer, in the model's own dtype and shape; copies."""
        found: dict[str, Tensor] = {}
        for part in self.global_parts:
            found |= part.fragment.unflatten(part.anchor)
        return found

    def prepare(self) -> None:
        """Make what can only be made once the optimizers have made their state."""
        for update in self.updates:
            update.prepare()

    def capture(self) -> None:
        """Take model and moments, which are the same on all workers, for the first block's start."""
        for update in self.updates:
            update.capture()

    def capture_moments(self) -> None:
        """Take the moments that were there at attach, which are the same on all workers."""
        for state in self.moment_states:
            state.capture()

    def checksum(self) -> int:
        """Of the state that the last exchanges left."""
        return combine(torch.tensor(update.state.checksum()) for update in self.updates)

    @property
    def keeps_state(self) -> bool:
        """Whether a block begins with something that optimizers kept on the workers, each by itself."""
        choices = (choice for update in self.updates for choice in update.optimizers.choices)
        return any(choice not in ("compensate", "reset") for choice in choices)
