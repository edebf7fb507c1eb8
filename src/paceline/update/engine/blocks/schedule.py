# SPDX-License-Identifier: Apache-2.0
"""Block payloads over time: the fragments of a model take turns, and each lands when it is due.

Exchanges of all fragments form one sequence, fragment `number mod F`, so that a worker which has run out of data knows
which fragment comes next and can join it. Several may be under way at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.reshard import Old
from paceline.core.flat import Modules
from paceline.core.optimizer_state import Owned
from paceline.errors import CheckpointError
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock
from paceline.update.engine.blocks.buffers import BufferLane
from paceline.update.engine.blocks.fragments import staggered
from paceline.update.engine.blocks.outer_state import Lane, ParameterLane
from paceline.update.engine.blocks.timing import Turns
from paceline.update.engine.blocks.update import BlockUpdate
from paceline.update.exchange.checksum import combine
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import ExchangeSummary
from paceline.update.exchange.kind import Kind
from paceline.update.exchange.outliers import Guard
from paceline.update.exchange.work import Work


class Blocks:
    """All fragments of a model under a block rule.

    Args:
        rule: the rule.
        exchanger: the connection.
        model: the user's modules (their buffers go with the first fragment).
        owned: (optimizer, its named parameters) pairs.
        state_device: where outer state lies; None for the parameters' own device.
        workers: N, as the rule counts them.
        guard: against contributions that are far larger than usual, or None.
    """

    def __init__(
        self,
        rule: Rule,
        exchanger: Exchanger,
        model: Modules,
        owned: Owned,
        state_device: torch.device | None,
        workers: int,
        guard: Guard | None = None,
    ) -> None:
        assert isinstance(rule.schedule, EveryBlock)
        self._schedule = rule.schedule
        self.updates = [
            BlockUpdate(
                rule, exchanger, None if number else model, part, state_device, Kind.block(number), workers, guard
            )
            for number, part in enumerate(staggered(owned, rule.schedule.fragments))
        ]
        self.turns = Turns([0] * len(self.updates))
        self.entered = [0] * len(self.updates)
        """Of each fragment, minibatches of this worker up to the end of its last block; its exchange may be under way,
        and will be in the global model."""

    # -- over time --------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        """The fragment whose turn it is."""
        return self.turns.begun % len(self.updates)

    def landing(self) -> Iterator[int]:
        """The fragments whose exchange has had its time."""
        return (f for f, made in list(self.turns.made.items()) if made >= self._schedule.overlap)

    def due(self) -> bool:
        """Whether the next fragment's block is over."""
        return self.turns.steps >= self.turns.ends(self._schedule)

    def asked(self, rests: bool) -> int | None:
        """After which step what somebody asked for is heard, where the time for it has come.

        Between which two exchanges that is follows from the schedule alone, so that it is the same for workers that go
        on and for one that `rests`, which makes no steps any more but comes to every exchange.
        """
        now = self.turns.ends(self._schedule) if rests else self.turns.steps
        return self.turns.asked.pop(0) if self.turns.asked and now >= self.turns.asked[0] else None

    def retune(self, rule: Rule, now: int) -> None:
        """Go on with other numbers of the rule from step `now` on."""
        assert isinstance(rule.schedule, EveryBlock)
        self.turns.retime(self._schedule, rule.schedule, now)
        self._schedule = rule.schedule
        for update in self.updates:
            update.retune(rule)

    @property
    def coming(self) -> bool:
        """Whether something is under way, and the next step begins nothing more."""
        return bool(self.turns.made) and self.turns.steps + 1 < self._schedule.ends(self.turns.begun)

    @property
    def quiet(self) -> bool:
        """Whether the next step neither begins an exchange nor lands one: nobody then looks at the parameters."""
        lands = any(made + 1 >= self._schedule.overlap for made in self.turns.made.values())
        return not lands and self.turns.steps + 1 < self.turns.ends(self._schedule)

    def begin(self, total: int, leaving: bool, idle: bool = False, waits: bool = False) -> None:
        """End the block of the fragment whose turn it is; it lands at once, or later.

        Args:
            total: minibatches of this worker since attach.
            leaving: whether the worker has come to its end.
            idle: whether it made none of the minibatches since the last exchange itself.
            waits: whether all merge, and wait for the result whatever the rule's overlap.
        """
        fragment, turns = self.next, self.turns
        work = Work(0 if idle else turns.since[fragment], total, leaving=leaving, merges=waits)
        turns.since[fragment] = 0
        turns.begin(self._schedule)
        self.entered[fragment] = total
        behind = self._schedule.overlap > 0 and not (leaving or waits)
        self.updates[fragment].begin(work, behind)
        if behind:
            turns.made[fragment] = 0
        if self.updates[fragment].left_out:
            self._restart_others(fragment)

    def _restart_others(self, fragment: int) -> None:
        """What spoilt one fragment has spoilt the others, which would spoil it again."""
        for other, update in enumerate(self.updates):
            if other == fragment:
                continue
            if other in self.turns.made:
                self.land(other)
            update.restart()
            self.turns.since[other] = 0

    def land(self, fragment: int) -> ExchangeSummary:
        """Apply the exchange of a fragment that `begin` sent."""
        summary = self.updates[fragment].land(self.turns.made.pop(fragment, None))
        if summary.asked:
            self.turns.hear(fragment, self._schedule.overlap)
        return summary

    @property
    def steps_committed(self) -> int:
        """Minibatches of this worker whose work is in all fragments of the global model."""
        return min(self.entered)

    # -- what others need -------------------------------------------------------------------------

    @property
    def block(self) -> int:
        """Blocks that have been exchanged, of the fragment that has seen most."""
        return max(update.block for update in self.updates)

    @property
    def lanes(self) -> list[Lane]:
        """Of all fragments."""
        return [lane for update in self.updates for lane in update.lanes]

    @property
    def parameter_lanes(self) -> list[ParameterLane]:
        """Of all fragments."""
        return [lane for update in self.updates for lane in update.parameter_lanes]

    @property
    def buffer_lanes(self) -> list[BufferLane]:
        """Of all fragments."""
        return [lane for update in self.updates for lane in update.buffer_lanes]

    @property
    def moment_parts(self) -> list[Lane]:
        """Lanes of the moments that were there at attach."""
        return [lane for update in self.updates for lane in update.moment_lanes or []]

    @property
    def global_parts(self) -> list[ParameterLane | BufferLane]:
        """The lanes whose anchors are the global model, with every exchange that has begun; waits for them."""
        for update in self.updates:
            update.arrive()
        return [*self.parameter_lanes, *self.buffer_lanes]

    def global_tensors(self) -> dict[str, Tensor]:
        """Name -> the global model's parameter or buffer, in the model's own dtype and shape; copies."""
        found: dict[str, Tensor] = {}
        for lane in self.global_parts:
            found |= lane.fragment.unflatten(lane.anchor)
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
        for update in self.updates:
            update.capture_moments()

    def checksum(self) -> int:
        """Of the state that the last exchanges left."""
        return combine(torch.tensor(update.checksum()) for update in self.updates)

    def state(self) -> list[dict[str, Any]]:
        """What a checkpoint holds of every fragment."""
        turns = self.turns
        for update in self.updates:
            update.arrive()
        rows: list[dict[str, Any]] = [
            {"outer": update.state(), "numbers": update.numbers(), "passing": update.passing(), "since": since}
            for update, since in zip(self.updates, turns.since, strict=True)
        ]
        rows[0]["turns"] = [turns.begun, turns.steps, sorted(turns.made.items())]
        rows[0]["retimed"] = [turns.at, turns.shift, turns.asked]
        rows[0]["entered"] = self.entered
        return rows

    def load(self, rows: list[dict[str, Any]]) -> None:
        """Put back what `state` gave."""
        for update, row in zip(self.updates, rows, strict=True):
            update.load(row["outer"], row["numbers"], row["passing"])
        begun, steps, made = rows[0]["turns"]
        self.entered = list(rows[0]["entered"])
        since, under_way = [row["since"] for row in rows], {int(f): int(n) for f, n in made}
        self.turns = Turns(since, under_way, begun, steps, *rows[0]["retimed"])

    # -- from another number of workers -----------------------------------------------------------

    @property
    def keeps_state(self) -> bool:
        """Whether a block begins with something that optimizers kept on the workers, each by itself."""
        return any(choice not in ("compensate", "reset") for update in self.updates for choice in update.choices)

    def saved(self, old: Old) -> list[dict[str, Any]]:
        """What all workers held alike of every fragment, out of a checkpoint of another number of workers.

        Nothing where it was made without blocks: by one worker, or by the processes of one host that were one.

        Raises:
            CheckpointError: it does not fit.
        """
        rows: list[dict[str, Any]] = []
        for number, update in enumerate(self.updates):
            at: tuple[str | int, ...] = ("exchange", "blocks", number)
            row = {name: old.part(0, *at, name) for name in ("outer", "numbers", "turns")}
            if row["outer"] is None:
                return []
            row["said"] = old.part(0, *at, "passing", "flight", "said")
            misfit = update.misfit(row["outer"])
            if misfit:
                raise CheckpointError(f"the checkpoint does not fit what is exchanged: {misfit}")
            rows.append(row)
        return rows

    def renumber(self, workers: int) -> None:
        """Others have left or come."""
        for update in self.updates:
            update.renumber(workers)

    def join(self, rows: list[dict[str, Any]]) -> None:
        """Begin in the middle of blocks that others are in, from what `saved` gave; after the optimizers' own."""
        for update, row in zip(self.updates, rows, strict=True):
            update.join(row["outer"], row["numbers"])
        self.align(int(rows[0]["turns"][0]))

    def align(self, begun: int) -> None:
        """So many exchanges have begun, and the next one is due after as many steps from now on every worker."""
        self.turns = Turns(self.turns.since, {}, begun, self._schedule.ends(begun - 1) if begun else 0)

    def regroup(self, rows: list[dict[str, Any]]) -> None:
        """Begin new blocks from what `saved` gave, or first ones where that is nothing; after the optimizers' own."""
        if not rows:
            for update in self.updates:
                update.start()
        for update, row in zip(self.updates, rows, strict=False):
            update.regroup(row["outer"], row["numbers"], row["said"])
        begun = int(rows[0]["turns"][0]) if rows else 0
        self.turns = Turns([0] * len(self.updates), {}, begun, self._schedule.ends(begun - 1) if begun else 0)
