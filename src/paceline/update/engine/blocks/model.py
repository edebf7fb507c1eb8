# SPDX-License-Identifier: Apache-2.0
"""A model in fragments, whose blocks are exchanged in turn: the schedule, the retuning, and the exchanges of a run.

Exchange k is of fragment `k mod F`, so a worker that has run out of data knows which fragment is next and can join.
Several exchanges may be in flight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.communication.calls import advice
from paceline.core.flat import Fragment
from paceline.core.optimizer_state import Owned
from paceline.core.shards import Shards, reshard
from paceline.core.world import World
from paceline.errors import ElsewhereError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock
from paceline.update.engine import agreement, global_model
from paceline.update.engine.blocks.fragment import BlockUpdate, FragmentState
from paceline.update.engine.blocks.numbers import BlockNumbers, LocalOptimizers
from paceline.update.engine.blocks.outer_state import BufferState, OuterState, ParameterState
from paceline.update.engine.context import RunContext
from paceline.update.exchange.checksum import combine
from paceline.update.exchange.exchanger import Exchanger
from paceline.update.exchange.header import NO_PAYLOAD, ExchangeHeader, ExchangeKind, ExchangeSummary, LocalWork


@dataclass
class FragmentSchedule:
    """Position in the sequence of exchanges.

    Attributes:
        since: of each fragment, minibatches since its last exchange began.
        made: fragment -> minibatches since its exchange began, of those in flight.
        begun: exchanges begun so far, by any worker.
        steps: minibatches since the first block began.
        at: the steps after which the last exchanges began, one for each fragment.
        shift: minibatches by which changes of the period have moved the schedule.
        requests: the steps after which workers gather tuning requests.
    """

    since: list[int]
    made: dict[int, int] = field(default_factory=dict)
    begun: int = 0
    steps: int = 0
    at: list[int] = field(default_factory=list)
    shift: int = 0
    requests: list[int] = field(default_factory=list)

    def stepped(self) -> None:
        """Count a minibatch."""
        self.steps += 1
        self.since = [n + 1 for n in self.since]
        self.made = {fragment: n + 1 for fragment, n in self.made.items()}

    def ends(self, schedule: EveryBlock) -> int:
        """The step after which the next exchange begins: the schedule's, or the first possible one."""
        step = schedule.ends(self.begun) + self.shift
        if self.at:
            step = max(step, self.at[-1] + 1)
        if len(self.at) == schedule.fragments:
            step = max(step, self.at[0] + schedule.overlap)  # the fragment's last exchange has landed by then
        return step

    def begin(self, schedule: EveryBlock) -> None:
        """Count the beginning of the next exchange."""
        self.at = [*self.at, self.ends(schedule)][-schedule.fragments :]
        self.begun += 1

    def retime(self, before: EveryBlock, after: EveryBlock, now: int) -> None:
        """Change the period: the present block ends when it has that many minibatches, or at once if it has more."""
        last = self.at[-1] if self.at else before.ends(self.begun - 1) + self.shift
        gap = after.ends(self.begun) - after.ends(self.begun - 1)
        self.shift = max(last + gap, now) - after.ends(self.begun)

    def add_request(self, fragment: int, overlap: int) -> None:
        """Schedule the gathering of a request, announced with a fragment's exchange, after all workers landed that."""
        number = self.begun - 1 - (self.begun - 1 - fragment) % len(self.since)
        self.requests = sorted([*self.requests, self.at[number - self.begun] + overlap])


def staggered(owned: Owned, fragments: int) -> list[Owned]:
    """Distribute a model's parameters over fragments, layer by layer, each to the smallest fragment so far.

    With equal layers that is the strided pattern of the Streaming DiLoCo publication. Parameters of a layer share their
    name up to the first number; if there are fewer layers than fragments, each parameter is a layer.
    """
    if fragments == 1:
        return [owned]
    named = [(name, p.numel()) for _, pairs in owned for name, p in pairs if p.numel()]
    if len(named) < fragments:
        raise UnsupportedError(
            f"the model has {len(named)} trainable parameters and cannot be exchanged in {fragments} fragments; "
            "use fewer fragments"
        )
    layers: dict[str, int] = {}
    for name, numel in named:
        layers[_layer(name)] = layers.get(_layer(name), 0) + numel
    key = _layer if len(layers) >= fragments else str
    sizes: dict[str, int] = {}
    for name, numel in named:
        sizes[key(name)] = sizes.get(key(name), 0) + numel
    loads, place = [0] * fragments, {}
    empty = fragments
    for number, (layer, numel) in enumerate(sizes.items()):
        least = loads.index(min(loads))
        if len(sizes) - number <= empty:  # every fragment needs a parameter
            least = loads.index(0)
        empty -= loads[least] == 0
        place[layer] = least
        loads[least] += max(numel, 1)
    return [
        [(optimizer, [(n, p) for n, p in pairs if place.get(key(n), 0) == f]) for optimizer, pairs in owned]
        for f in range(fragments)
    ]


def _layer(name: str) -> str:
    match = re.match(r"(.*?\d+)(\.|$)", name)
    return match.group(1) if match else name.split(".", 1)[0]


class Retuning:
    """Applies the rule's new settings to the blocks.

    Args:
        run: the context that the parts of the run share.
        rule: with its present numbers.
        blocks: the run's blocks, or None.
    """

    def __init__(self, run: RunContext, rule: Rule, blocks: FragmentedModel | None) -> None:
        self._tuner, self._transport, self.rule, self._blocks = run.tuner, run.transport, rule, blocks

    def begin(self, rule: Rule, blocks: FragmentedModel | None) -> None:
        """Continue with another rule and its blocks."""
        self.rule, self._blocks = rule, blocks

    def agree(self) -> None:
        """Gather the workers' requests, and decide; every worker calls it at the same place."""
        self._tuner.exchange_requests(self._transport)

    def apply(self, now: int) -> None:
        """Apply the decision, if any; `now` counts the steps since the first block began."""
        if not self._tuner.decided:
            return
        self._tuner.apply()
        self.follow(self._tuner.rule, now)

    def follow(self, rule: Rule, now: int = 0) -> None:
        """Continue with changed settings of the rule."""
        if rule is not self.rule and self._blocks is not None:
            self._blocks.retune(rule, now)
        self.rule = rule


class FragmentedModel:
    """All fragments of a model under a block rule.

    Args:
        rule: the rule.
        exchanger: the connection.
        run: the context that the parts of the run share; the buffers of its model belong to the first fragment.
        workers: N, as the rule counts them.

    Attributes:
        updates: of each fragment.
        schedule: the fragment schedule.
        entered: of each fragment, this worker's minibatches up to the end of its last block, whose exchange may be in
            flight.
    """

    def __init__(self, rule: Rule, exchanger: Exchanger, run: RunContext, workers: int) -> None:
        self._rule_schedule, self._model = rule.blocks, run.model
        shards = Shards(parameter for _, named in run.owned for _, parameter in named)
        self._sharded = bool(shards)
        self.updates: list[BlockUpdate] = []
        for number, part in enumerate(staggered(run.owned, rule.schedule.fragments)):
            model = None if number else run.model
            optimizers, numbers = LocalOptimizers(rule.delta, part, workers), BlockNumbers(rule, workers)
            device = run.settings.outer_state_device
            state = FragmentState(model, optimizers, numbers, device, lambda: exchanger.transport.world)
            kind = ExchangeKind.block(number)
            self.updates.append(BlockUpdate(state, exchanger, kind, run.settings.guard, shards, run.observers))
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
        if self._sharded:
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

    def enter(self, steps: int) -> None:
        """All of this worker's minibatches so far are in the global model."""
        self.entered = [steps] * len(self.updates)

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


class MergePoint:
    """Detects whether all workers call `run.merge()`.

    A merging worker keeps joining exchanges until all merge: another may have one more step, which ends a block. A
    worker that ends more blocks than that has not called `merge`.

    Args:
        world: this worker.
        fragments: exchanges of one merge.
    """

    def __init__(self, world: World, fragments: int) -> None:
        self._world, self._fragments = world, fragments
        self._apart = self.together = 0

    def begin(self) -> None:
        """A merge begins."""
        self.together = 0

    def look(self, summary: ExchangeSummary) -> None:
        """Count an exchange of blocks.

        Raises:
            ElsewhereError: some workers merge and others train on; raised on every worker.
        """
        merging = [rank for rank, h in enumerate(summary.headers) if h.merges]
        others = [rank for rank, h in enumerate(summary.headers) if not (h.merges or h.leaving or h.kind.joins)]
        self.together = 0 if others or not merging else self.together + 1
        self._apart = self._apart + 1 if merging and others else 0
        if self._apart > self._fragments:
            raise ElsewhereError(
                self._world.sign(
                    f"the workers make different calls: {self._world.names(merging)} in run.merge(), "
                    f"{self._world.names(others)} in optimizer.step(), at the end of a block. {advice('run.merge()')}"
                )
            )


class BlockExchanges:
    """The block exchanges of a run.

    Args:
        run: the context that the parts of the run share.
        blocks: all fragments of the model.
        exchanger: the connection among all workers.
        retuning: changes the rule's numbers between two exchanges.
    """

    def __init__(self, run: RunContext, blocks: FragmentedModel, exchanger: Exchanger, retuning: Retuning) -> None:
        self._run, self.blocks, self._exchanger, self._retuning = run, blocks, exchanger, retuning
        self._merge_point = MergePoint(run.transport.world, len(blocks.updates))

    def advance(self, idle: bool) -> None:
        """After a step of a block: land the exchanges that are due, and begin the next one if it is due.

        Args:
            idle: whether another process of the host made it.
        """
        blocks, schedule = self.blocks, self.blocks.schedule
        if schedule.made:
            self._exchanger.progress()
        schedule.stepped()
        for fragment in blocks.landing() if schedule.made else ():
            self.land(fragment)
        if schedule.requests:
            self._read_requests(rests=False)
        if blocks.due():
            self._end_block(leaving=False, idle=idle)
            if schedule.requests:
                self._read_requests(rests=False)

    def _end_block(self, leaving: bool, idle: bool = False, waits: bool = False) -> ExchangeSummary | None:
        """End a fragment's block; returns the summary if the worker waits for the result."""
        fragment = self.blocks.next
        self._run.monitor.begin()
        self.blocks.begin(self._run.progress.steps, leaving, idle, waits)
        if fragment in self.blocks.schedule.made:
            self._run.monitor.sent()
            return None
        return self.land(fragment, begun=True)

    def land(self, fragment: int, begun: bool = False) -> ExchangeSummary:
        """Wait for an exchange, and apply it."""
        monitor = self._run.monitor
        if not begun:
            monitor.begin()
        summary = self.blocks.land(fragment)
        self._note(summary, fragment)
        return summary

    def _note(self, summary: ExchangeSummary, fragment: int) -> None:
        """Note an exchange that was applied."""
        self._merge_point.look(summary)
        effective = self.blocks.updates[fragment].numbers.diversity.effective
        timing, block = self._exchanger.timing, self.blocks.block
        self._run.monitor.end(timing, summary, block=block, warmup=False, effective=effective)

    def wait(self, total: int) -> ExchangeSummary:
        """At the end of this worker's pass: join the others' blocks, with what it has made so far, until all are there.

        Args:
            total: this worker's minibatches, for the header.

        Returns:
            The headers then.
        """
        while True:
            self._read_requests(rests=True)
            pending_header = self._exchanger.open(self.blocks.waiting_header(total))
            if pending_header.summary().all_stand:
                return pending_header.summary()
            self.land_all()  # only now: what is in flight may stay there if no exchange follows
            self._exchanger.hold(pending_header)
            fragment = self.blocks.next
            self._run.monitor.begin()
            summary = self.blocks.stand(self._run.progress.steps)
            self._note(summary, fragment)
            if summary.asked:
                self._retuning.agree()
                self._retuning.apply(self.blocks.schedule.steps)

    def land_all(self) -> None:
        """Wait for every pending exchange, and apply it."""
        for fragment in sorted(self.blocks.schedule.made):
            self.land(fragment)

    def _read_requests(self, rests: bool) -> None:
        """Agree on the tuning requests that are due, and apply them."""
        while (now := self.blocks.requests_due(rests)) is not None:
            self._retuning.agree()
            self._retuning.apply(now)

    def merge(self) -> None:
        """End the current block of every fragment, at any number of minibatches."""
        blocks = self.blocks
        self.land_all()
        self._merge_point.begin()
        while self._merge_point.together < len(blocks.updates):
            self._end_block(leaving=False, waits=True)
            while blocks.schedule.requests:
                blocks.schedule.requests.pop()
                self._retuning.agree()
        blocks.align(blocks.schedule.begun)
        self._retuning.apply(blocks.schedule.steps)

    def finish(self) -> None:
        """Exchange every fragment once more after all workers are done, and leave the global model in the user's."""
        quiet = 0
        while quiet < len(self.blocks.updates):
            self._read_requests(rests=True)
            at = self.blocks.schedule.at
            summary = self._end_block(leaving=True)
            assert summary is not None
            if summary.all_stand and not summary.all_leaving:
                self.blocks.uncount(at)
            quiet = quiet + 1 if summary.all_leaving else 0
        parts = self.blocks.global_parts
        others = [part for part in parts if part.fragment.from_rank_0]  # written since the last exchange, too
        agreement.broadcast_start(self._run.transport, [part.fragment for part in others])
        for part in others:
            part.capture()
        global_model.settle(self._run.model, parts)
