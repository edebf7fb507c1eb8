# SPDX-License-Identifier: Apache-2.0
"""A model in fragments, whose blocks are exchanged in turn: the schedule, and the exchanges of a run.

Exchange k is of fragment `k mod F`, so a worker that has run out of data knows which fragment is next and can join.
Several exchanges may be in flight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from paceline.communication.base import BLOCK, advice
from paceline.core.flat import Fragment, Shards, reshard
from paceline.core.optimizer_state import Owned
from paceline.errors import ElsewhereError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock
from paceline.rules.schedule.uneven import effective
from paceline.update.engine import agreement, global_model
from paceline.update.engine.blocks.fragment import BlockUpdate, FragmentState, LocalOptimizers
from paceline.update.engine.blocks.outer_state import BlockNumbers, BufferState, OuterState, ParameterState
from paceline.update.engine.context import RunContext
from paceline.update.exchange.exchanger import NO_PAYLOAD, ExchangeHeader, Exchanger, ExchangeSummary, combine


@dataclass
class FragmentSchedule:
    """Position in the sequence of exchanges."""

    since: list[int]  # of each fragment, minibatches since its last exchange began
    # fragment -> minibatches since its exchange began, of those in flight
    made: dict[int, int] = field(default_factory=dict)
    begun: int = 0  # exchanges begun so far, by any worker
    steps: int = 0  # minibatches since the first block began
    at: list[int] = field(default_factory=list)  # the steps after which the last exchanges began, one for each fragment
    shift: int = 0  # minibatches by which changes of the period have moved the schedule
    requests: list[int] = field(default_factory=list)  # the steps after which workers gather tuning requests
    _end: int | None = field(default=None, compare=False)

    def stepped(self) -> None:
        self.steps += 1
        self.since = [n + 1 for n in self.since]
        self.made = {fragment: n + 1 for fragment, n in self.made.items()}

    def ends(self, schedule: EveryBlock) -> int:
        """The step after which the next exchange begins: the schedule's, or the first possible one."""
        if self._end is None:
            self._end = schedule.ends(self.begun) + self.shift
            if self.at:
                self._end = max(self._end, self.at[-1] + 1)
            if len(self.at) == schedule.fragments:  # the fragment's last exchange has landed by then
                self._end = max(self._end, self.at[0] + schedule.overlap)
        return self._end

    def begin(self, schedule: EveryBlock) -> int:
        """Count the beginning of the next exchange; the minibatches of its block."""
        fragment = self.begun % len(self.since)
        minibatches, self.since[fragment] = self.since[fragment], 0
        self.at = [*self.at, self.ends(schedule)][-schedule.fragments :]
        self.begun, self._end = self.begun + 1, None
        return minibatches

    def uncount(self, at: list[int]) -> None:
        """The exchange that was begun last is none: no worker brought anything, and some will later."""
        self.begun, self.at, self._end = self.begun - 1, at, None

    def retime(self, before: EveryBlock, after: EveryBlock, now: int) -> None:
        """Change the period: the present block ends when it has that many minibatches, or at once if it has more."""
        last = self.at[-1] if self.at else before.ends(self.begun - 1) + self.shift
        gap = after.ends(self.begun) - after.ends(self.begun - 1)
        self.shift, self._end = max(last + gap, now) - after.ends(self.begun), None

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
    key = _layer if len({_layer(name) for name, _ in named}) >= fragments else str
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


class FragmentedModel:
    """All fragments of a model under a block rule; its buffers belong to the first fragment."""

    def __init__(self, rule: Rule, exchanger: Exchanger, run: RunContext, workers: int) -> None:
        self._model = run.model
        shards = Shards(parameter for _, named in run.owned for _, parameter in named)
        self._sharded = shards.any
        self._rule_schedule, delta = rule.blocks, rule.delta  # the schedule is this worker's
        self._rank, self.periods = run.transport.world.rank, tuple[int, ...]()
        device = torch.device("cpu") if run.settings.outer_state == "host" else None  # None: each tensor's own
        self.updates: list[BlockUpdate] = []
        for number, part in enumerate(staggered(run.owned, rule.schedule.fragments)):
            model = None if number else run.model
            optimizers, numbers = LocalOptimizers(delta, part, workers), BlockNumbers(rule, workers)
            state = FragmentState(model, optimizers, numbers, device, lambda: exchanger.transport.world)
            self.updates.append(BlockUpdate(number, state, exchanger, run.settings.guard, shards, run.observers))
        self.schedule = FragmentSchedule([0] * len(self.updates))
        # of each fragment, this worker's minibatches up to the end of its last block, whose exchange may be in flight
        self.entered = [0] * len(self.updates)
        self._landed: set[int] = set()

    # -- schedule ---------------------------------------------------------------------------------

    @property
    def next(self) -> int:
        return self.schedule.begun % len(self.updates)

    def landing(self) -> Iterator[int]:
        """The fragments whose exchange is due to land."""
        return (f for f, made in list(self.schedule.made.items()) if made >= self._rule_schedule.overlap)

    def due(self) -> bool:
        return self.schedule.steps >= self.schedule.ends(self._rule_schedule)

    def requests_due(self, rests: bool) -> int | None:
        """The step after which workers gather tuning requests, if that is due, else None.

        It follows from the schedule alone, so it lies between the same two exchanges for workers that train and for one
        that `rests`: it makes no more steps, but joins every exchange.
        """
        schedule = self.schedule
        now = schedule.ends(self._rule_schedule) if rests else schedule.steps
        return schedule.requests.pop(0) if schedule.requests and now >= schedule.requests[0] else None

    def retune(self, rule: Rule, now: int, periods: tuple[int, ...] = ()) -> None:
        """Continue with other numbers of the rule from step `now` on; `periods`: minibatches of each worker in a block,
        empty where they are equal."""
        mine = rule.blocks
        if periods:
            made, hides = periods[self._rank], round(mine.overlap * periods[self._rank] / mine.period)
            mine = replace(mine, period=made, overlap=min(made, max(hides, int(mine.overlap > 0))))
        # a checkpoint that is due is taken before the next step, by all or by none
        self.schedule.retime(self._rule_schedule, mine, now + bool(periods or self.periods))
        self._rule_schedule, self.periods = mine, periods
        for update in self.updates:
            update.retune(rule)
            update.numbers.worth = effective(periods) if periods else None

    def release(self) -> None:
        for update in self.updates:
            update.optimizers.release()

    @property
    def coming(self) -> bool:
        """Whether an exchange is in flight, and the next step begins no other."""
        return bool(self.schedule.made) and self.schedule.steps + 1 < self.schedule.ends(self._rule_schedule)

    @property
    def quiet_steps(self) -> int:
        """How many of the next steps neither begin nor land an exchange, so that nothing reads the parameters."""
        schedule = self.schedule
        lands = [self._rule_schedule.overlap - made for made in schedule.made.values()]
        return max(0, min([schedule.ends(self._rule_schedule) - schedule.steps, *lands]) - 1)

    def begin(self, total: int, leaving: bool, idle: bool = False, waits: bool = False) -> None:
        """End the next fragment's block, and start its exchange: the worker is `leaving` its data for good, another
        process of the host made the minibatches (`idle`), or all merge, and wait despite the rule's overlap."""
        fragment = self.next
        update, made = self.updates[fragment], self.schedule.begin(self._rule_schedule)
        minibatches = 0 if idle else made
        self.entered[fragment] = total
        overlapped = self._rule_schedule.overlap > 0 and not (leaving or waits)
        header = ExchangeHeader(
            0, BLOCK + fragment, minibatches > 0, leaving, True, minibatches, total=total, merges=waits
        )
        update.begin(header, overlapped)
        if overlapped:
            self.schedule.made[fragment] = 0
        if update.left_out:
            self._restart_others(fragment)

    def stand(self, total: int) -> ExchangeSummary:
        """Join a block that another worker brings with what this one has made since the last one of its fragment."""
        fragment, schedule = self.next, self.schedule
        update = self.updates[fragment]
        update.begin(ExchangeHeader(minibatches=schedule.since[fragment], total=total))
        summary = update.land(None)
        schedule.begin(self._rule_schedule)
        schedule.steps = schedule.at[-1]
        self.entered[fragment] = total
        if update.left_out:
            self._restart_others(fragment)
        return summary

    def waiting_header(self, total: int) -> ExchangeHeader:
        """The header of a worker at the end of its pass, which joins an exchange if another worker brings one."""
        minibatches = self.schedule.since[self.next]
        finite = not minibatches or self.updates[self.next].state.finite()
        factor = minibatches / self.updates[0].numbers.rule.schedule.period if finite else 0.0
        return ExchangeHeader(finite=finite, minibatches=minibatches, factor=factor, total=total)

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
        summary = self.updates[fragment].land(self.schedule.made.pop(fragment, None))
        if self._sharded:
            reshard(self._model)
        self._landed.add(fragment)
        if summary.asked:
            self.schedule.add_request(fragment, self._rule_schedule.overlap)
        return summary

    def take_written(self) -> list[Fragment]:
        landed, self._landed = self._landed, set()
        return [state.fragment for k in landed for state in self.updates[k].state.parameters]

    def align(self, begun: int) -> None:
        """Set the number of exchanges begun; the next one is due after the same number of steps on every worker."""
        steps = self._rule_schedule.ends(begun - 1) if begun else 0
        self.schedule = FragmentSchedule(self.schedule.since, {}, begun, steps)

    def renumber(self, workers: int) -> None:
        for update in self.updates:
            update.renumber(workers)

    # -- the global model -------------------------------------------------------------------------

    def enter(self, steps: int) -> None:
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
        return [state for update in self.updates for state in update.state.all]

    @property
    def moment_states(self) -> list[OuterState]:
        return [state for update in self.updates for state in update.state.moments or []]

    def arrive(self) -> None:
        """Wait until the outer state has the results of all in-flight exchanges."""
        for update in self.updates:
            if update.in_flight is not None:
                update.in_flight.arrive()

    @property
    def global_parts(self) -> list[ParameterState | BufferState]:
        """The outer states that hold the global model; waits for in-flight exchanges."""
        self.arrive()
        states = [update.state for update in self.updates]
        return [*(one for state in states for one in state.parameters), *(one for s in states for one in s.buffers)]

    def capture(self) -> None:
        """Take the present model and moments, the same on all workers, as the first block's start."""
        for update in self.updates:
            update.capture()

    def capture_moments(self) -> None:
        """Take the moments of attach, the same on all workers, as the first block's start."""
        for state in self.moment_states:
            state.capture()

    def checksum(self) -> int:
        return combine(torch.tensor(update.state.checksum()) for update in self.updates)

    @property
    def keeps_state(self) -> bool:
        """Whether optimizers keep state of their own from block to block."""
        choices = (choice for update in self.updates for choice in update.optimizers.choices)
        return any(choice not in ("compensate", "reset") for choice in choices)


class BlockExchanges:
    """The block exchanges of a run; `retune` applies the tuning requests that were decided, after that many steps since
    the first block began."""

    def __init__(
        self, run: RunContext, blocks: FragmentedModel, exchanger: Exchanger, retune: Callable[[int], None]
    ) -> None:
        self._run, self.blocks, self._exchanger, self._retune = run, blocks, exchanger, retune
        self._apart = self._together = 0  # exchanges in a row in which some workers, and all, called `merge`

    def advance(self, idle: bool) -> None:
        """After a step of a block: land the exchanges that are due, and begin the next one if it is due."""
        blocks, schedule = self.blocks, self.blocks.schedule
        if schedule.made:
            self._exchanger.progress()
        schedule.stepped()
        for fragment in blocks.landing() if schedule.made else ():
            self.land(fragment)
        self._read_requests(rests=False)
        if blocks.due():
            fragment = blocks.next
            self._run.monitor.begin()
            blocks.begin(self._run.progress.steps, leaving=False, idle=idle)
            if fragment in blocks.schedule.made:
                self._run.monitor.sent()
            else:
                self._note(blocks.land(fragment), fragment)
            self._read_requests(rests=False)

    def _end_block(self, leaving: bool, waits: bool = False) -> ExchangeSummary:
        """End a fragment's block, and wait for the result, also where the rule overlaps."""
        fragment = self.blocks.next
        self._run.monitor.begin()
        self.blocks.begin(self._run.progress.steps, leaving, waits=waits)
        return self._note(self.blocks.land(fragment), fragment)

    def land(self, fragment: int) -> None:
        self._run.monitor.begin()
        self._note(self.blocks.land(fragment), fragment)

    def _note(self, summary: ExchangeSummary, fragment: int) -> ExchangeSummary:
        self._look_for_merges(summary)
        timing, block = self._exchanger.timing, self.blocks.block
        effective = self.blocks.updates[fragment].numbers.diversity.effective
        self._run.monitor.end(timing, summary, block=block, warmup=False, effective=effective)
        return summary

    def _look_for_merges(self, summary: ExchangeSummary) -> None:
        """Count an exchange for those that merge.

        A merging worker keeps joining exchanges until all merge: another may have one more step, which ends a block. A
        worker that ends more blocks than that has not called `merge`: then every worker raises `ElsewhereError`.
        """
        merging = [rank for rank, h in enumerate(summary.headers) if h.merges]
        others = [rank for rank, h in enumerate(summary.headers) if not (h.merges or h.leaving or h.kind == NO_PAYLOAD)]
        self._together = 0 if others or not merging else self._together + 1
        self._apart = self._apart + 1 if merging and others else 0
        if self._apart > len(self.blocks.updates):
            world = self._run.transport.world
            raise ElsewhereError(
                world.sign(
                    f"the workers make different calls: {world.names(merging)} in run.merge(), "
                    f"{world.names(others)} in optimizer.step(), at the end of a block. {advice('run.merge()')}"
                )
            )

    def wait(self, total: int) -> ExchangeSummary:
        """At the end of this worker's pass: join the others' blocks, with what it has made so far, until all are there;
        the headers then."""
        while True:
            flying = [one.in_flight for one in self.blocks.updates if one.in_flight is not None]
            if self._run.loaders.counts and any(h.asks for one in flying for h in one.headers):
                self.land_all()  # those that came here sooner read the request now
            self._read_requests(rests=True)
            pending_header = self._exchanger.open(self.blocks.waiting_header(total))
            if pending_header.summary().all_stand:
                return pending_header.summary()
            self.land_all()  # only now: what is in flight may stay there if no exchange follows
            self._exchanger.hold(pending_header)
            fragment = self.blocks.next
            self._run.monitor.begin()
            if self._note(self.blocks.stand(self._run.progress.steps), fragment).asked:
                self._run.tuner.exchange_requests(self._run.transport)
                self._retune(self.blocks.schedule.steps)

    def land_all(self) -> None:
        for fragment in sorted(self.blocks.schedule.made):
            self.land(fragment)

    def _read_requests(self, rests: bool) -> None:
        """Agree on the tuning requests that are due, and apply them."""
        while (now := self.blocks.requests_due(rests)) is not None:
            self._run.tuner.exchange_requests(self._run.transport)
            self._retune(now)

    def merge(self) -> None:
        """End the current block of every fragment, at any number of minibatches."""
        blocks = self.blocks
        self.land_all()
        self._together = 0
        while self._together < len(blocks.updates):
            self._end_block(leaving=False, waits=True)
            while blocks.schedule.requests:
                blocks.schedule.requests.pop()
                self._run.tuner.exchange_requests(self._run.transport)
        blocks.align(blocks.schedule.begun)
        self._retune(blocks.schedule.steps)

    def finish(self) -> None:
        """Exchange every fragment once more after all workers are done, and leave the global model in the user's."""
        quiet = 0
        while quiet < len(self.blocks.updates):
            self._read_requests(rests=True)
            at = self.blocks.schedule.at
            summary = self._end_block(leaving=True)
            if summary.all_stand and not summary.all_leaving:
                self.blocks.schedule.uncount(at)
            quiet = quiet + 1 if summary.all_leaving else 0
        parts = self.blocks.global_parts
        others = [part for part in parts if part.fragment.from_rank_0]  # written since the last exchange, too
        agreement.broadcast_start(self._run.transport, [part.fragment for part in others])
        for part in others:
            part.capture()
        global_model.settle(self._run.model, parts)
