# SPDX-License-Identifier: Apache-2.0
"""The engine of workers that exchange together: gradients at every step, or blocks.

At the end of a pass, and of a run, each worker keeps joining exchanges until all are there. A worker may come to the
end of its pass before the others: it had fewer batches, or its program skipped some. Without this, its first exchange
of the next pass would meet the others' last one of this pass. So it joins with an empty contribution (under block rules
with what it has made so far) until all workers are at their end. Workers that have made fewer steps then take over the
model, the optimizers and the schedules of one that has made the most.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.checkpoint import ExchangePosition
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication import Transport
from paceline.core import kernels
from paceline.core.flat import Fragment, Shards
from paceline.core.optimizer_state import Owned, restore_beta1
from paceline.core.state_tree import build, flatten
from paceline.core.world import World
from paceline.data.ledger.epoch_ledger import Leases
from paceline.data.sharing.place import CALLED_WITHIN, INSIDE, LEFT, Place, pack
from paceline.errors import ElsewhereError, MismatchError
from paceline.rules.codec import Dense
from paceline.rules.rule import Rule
from paceline.rules.topology import Flat
from paceline.update.engine import agreement, exit_handling
from paceline.update.engine.agreement import begin_together
from paceline.update.engine.blocks import saved as saved_blocks
from paceline.update.engine.blocks.model import BlockExchanges, FragmentedModel
from paceline.update.engine.context import RunContext
from paceline.update.engine.grad_scaler import stepping_scaler
from paceline.update.engine.gradients.update import RESHARDED, SKIPPED, GradientExchanges
from paceline.update.engine.turns import Turns
from paceline.update.exchange.departures import Departures
from paceline.update.exchange.exchanger import (
    STEPPED,
    WAITING,
    WARMUP_END,
    ExchangeHeader,
    Exchanger,
    ExchangeSummary,
    Reports,
    combine,
    gradients_kind,
    of_tensors,
)

logger = logging.getLogger("paceline")


class Handover:
    """Gives other workers one worker's state: of the optimizers, and of the objects that `included` gives by name."""

    def __init__(self, run: RunContext, gradients: GradientExchanges, included: Callable[[], dict[str, Any]]) -> None:
        self._run, self._gradients, self._included = run, gradients, included

    def give(self, source: int, takes: bool, transport: Transport | None = None, state: bool = True) -> None:
        """Worker `source` of the connection gives its state to those that take it; every worker of it calls this.
        `state`: with the optimizers' state, beside their settings and the objects."""
        transport = transport if transport is not None else self._run.transport
        given = broadcast(transport, self._state(state) if transport.world.rank == source else None, source)
        if takes:
            self._take(given)

    @property
    def _objects(self) -> dict[str, Any]:
        """What has a state of its own beside the optimizers."""
        objects = dict(self._included())
        known = {id(thing) for thing in objects.values()}
        scalers = [self._run.settings.scaler, *(update.scaling.scaler for update in self._gradients.updates)]
        others = {**schedulers(self._run.owned), "GradScaler": next((one for one in scalers if one is not None), None)}
        return objects | {name: one for name, one in others.items() if one is not None and id(one) not in known}

    def _state(self, state: bool) -> dict[str, Any]:
        states = [optimizer.state_dict() for optimizer, _ in self._run.owned]
        return {
            "optimizers": states if state else [],
            "groups": [
                [{name: value for name, value in group.items() if name != "params"} for group in one["param_groups"]]
                for one in states
            ],
            "objects": {name: thing.state_dict() for name, thing in self._objects.items()},
        }

    def hand_on(self, source: int) -> None:
        """Worker `source` gives its optimizers' state to all others; what their programs have set stays."""
        transport, optimizers = self._run.transport, [optimizer for optimizer, _ in self._run.owned]
        states = [optimizer.state.get(one, {}) for optimizer, named in self._run.owned for _, one in named]
        kept = [sorted(state.items()) for state in states]
        tensors = [value for pairs in kept for _, value in pairs if isinstance(value, Tensor)]
        kinds = [
            [(name, getattr(value, "shape", value), getattr(value, "dtype", None)) for name, value in pairs]
            for pairs in kept
        ]
        if len(set(transport.meet(crc32(repr(kinds).encode())))) == 1:
            spread(transport, tensors, source)
            return
        own = {"states": [one.state_dict()["state"] for one in optimizers]} if transport.world.rank == source else None
        given = broadcast(transport, own, source)
        for optimizer, state in zip(optimizers, given["states"], strict=True) if own is None else ():
            optimizer.load_state_dict({**optimizer.state_dict(), "state": state})

    def _take(self, given: dict[str, Any]) -> None:
        for (optimizer, _), saved in zip(self._run.owned, given["optimizers"], strict=False):
            optimizer.load_state_dict(saved)
        for (optimizer, _), groups in zip(self._run.owned, given["groups"], strict=True):
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for name, value in settings.items():
                    if isinstance(group.get(name), Tensor):  # in place: the program may hold it
                        group[name].copy_(value)
                    else:
                        group[name] = value
        for name, thing in self._objects.items():
            if name in given["objects"]:
                thing.load_state_dict(given["objects"][name])


def schedulers(owned: Owned) -> dict[str, LRScheduler]:
    """The program's schedulers of these optimizers, by a name that is the same on every worker."""
    numbers = {id(optimizer): number for number, (optimizer, _) in enumerate(owned)}
    all_of_them = [
        thing
        for thing in gc.get_objects()  # torch keeps no list of them
        if issubclass(type(thing), LRScheduler) and id(getattr(thing, "optimizer", None)) in numbers
    ]
    inner = {id(one) for outer in all_of_them for one in getattr(outer, "_schedulers", ())}
    found: dict[str, LRScheduler] = {}
    for one in all_of_them:
        name = f"{type(one).__name__} of optimizer {numbers[id(one.optimizer)]}"
        while name in found:
            name += "'"
        if id(one) not in inner:
            found[name] = one
    return found


def broadcast(transport: Transport, own: dict[str, Any] | None, source: int) -> dict[str, Any]:
    """The state of worker `source` on every worker."""
    tensors = dict[str, Tensor]()
    rest = flatten(own, tensors, "")
    rows = [[name, flatten(one.dtype, {}, ""), list(one.shape)] for name, one in tensors.items()]
    rest, rows = transport.gather_json([rest, rows] if own is not None else None)[source]
    found = {name: torch.empty(shape, dtype=build(kind, {})) for name, kind, shape in rows}
    for name, tensor in tensors.items():
        found[name].copy_(tensor)
    spread(transport, list(found.values()), source)
    state: dict[str, Any] = build(rest, found)
    return state


@torch.no_grad()
def spread(transport: Transport, tensors: Sequence[Tensor], source: int) -> None:
    """All workers take the values of worker `source`, in tensors of the same shapes; a part of them at a time."""
    full = [one for one in tensors if one.numel()]
    for few in (full[k : k + 64] for k in range(0, len(full), 64)):
        device = transport.wire_device(few[0].device)
        parts = [one.reshape(-1).view(torch.uint8).to(device) for one in few]
        flat = torch.cat(parts)
        transport.broadcast(flat, source).wait()
        for one, part in zip(few, torch.split(flat, [len(part) for part in parts]), strict=True):
            one.copy_(part.clone().view(one.dtype).view(one.shape))  # a copy, because a view is to be aligned


class Engine:
    """The steps of a run of several workers; an :class:`paceline.update.engine.protocol.EngineProtocol`.

    A choice of the rule during the run changes what it exchanges.
    """

    blocks: FragmentedModel | None  # all fragments of the model, if the rule has blocks and there are several workers
    block_exchanges: BlockExchanges | None
    leases: Leases | None = None  # every worker computes all workers' parts of the data
    keeps_steps = True

    def __init__(self, run: RunContext, included: Callable[[], dict[str, Any]] = dict) -> None:
        self.run, self.progress, transport = run, run.progress, run.transport
        rule = run.tuner.tunables.rule
        self.fragments = begin_together(transport, rule, run.model, run.owned, _what_all_share(run))
        self.rule, self._departures = rule, Departures(lambda: run.loaders.made)
        self.exchanger = self._connect(rule)
        # the connection among the processes of this host, if they are one worker and any host has several
        self.host = _within_host(run) if rule.settings.within else None
        blocks = None if run.tuner.measured.probing else blocks_of(run, rule, self.exchanger)
        if blocks is not None and blocks.moment_states:  # of before attach: rank 0's on all workers
            agreement.broadcast_start(transport, [state.fragment for state in blocks.moment_states])
            blocks.capture_moments()
        self.gradient_exchanges = GradientExchanges(run, within_host=self.host is not None)
        self.handover = Handover(run, self.gradient_exchanges, included)
        self._exchange_blocks(blocks)
        # steps of the other workers in the passes so far that this one did not make, under a block rule
        self.missed = 0
        self._told = False  # whether the user knows of skipped minibatches
        if self.progress.lockstep:
            self.gradient_exchanges.start(self.exchanger)
        elif self.host is not None:
            self.gradient_exchanges.start(self.host)

    def _connect(self, rule: Rule) -> Exchanger:
        run, overlapped, devices = self.run, rule.schedule.overlap > 0, _devices(self.run)
        reports = Reports(lambda: run.tuner.asks, run.loaders.place, self._departures.look)
        return Exchanger(run.transport, rule.codec, rule.common, overlapped, devices, reports)

    def _exchange_blocks(self, blocks: FragmentedModel | None) -> None:
        """Exchange these blocks from now on, or none."""
        self.blocks, self.block_exchanges = blocks, None
        if blocks is not None:
            self._change(blocks.updates[0].numbers.rule)
            self.block_exchanges = BlockExchanges(self.run, blocks, self.exchanger, self._retune)

    # -- position ---------------------------------------------------------------------------------

    @property
    def local(self) -> bool:
        return self.gradient_exchanges.local

    def keep_local(self, now: bool) -> None:
        self.gradient_exchanges.keep_local(now)

    @property
    def gradients_due(self) -> bool:
        return (self.progress.lockstep or self.host is not None) and not self.gradient_exchanges.closed

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
        return self.blocks.block if self.blocks is not None else 0

    @property
    def steps_committed(self) -> int:
        blocks = self.blocks
        return self.progress.steps if blocks is None or self.progress.lockstep else blocks.steps_committed

    @property
    def exchange_position(self) -> ExchangePosition:
        blocks, host, one = self.blocks, self.host, self.exchanger
        if blocks is None or self.progress.lockstep:
            one = one if self.progress.lockstep or host is None else host
            return ExchangePosition(self.progress.exchanges, one.sequence, one.left, awaited=one.awaited)
        begun = self.rule.schedule.warmup + blocks.schedule.begun
        coming = blocks.coming and not self.run.loaders.counts  # a worker with fewer batches may not come so far
        return ExchangePosition(begun, one.sequence, one.left, coming, one.awaited)

    @property
    def global_model(self) -> FragmentedModel | None:
        """The blocks, if the user's model differs from the global one."""
        return None if self.progress.lockstep or self.gradient_exchanges.closed else self.blocks

    # -- at a step --------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Make sure that the gradients are the workers' mean."""
        tuner = self.run.tuner
        if tuner.measured.probing and stepping_scaler() is not None:
            tuner.measured.end_probe("a GradScaler makes the steps")
        if tuner.measured.gave_up:
            self.follow_choice()
        else:
            self.gradient_exchanges.before_step(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        if self.gradient_exchanges.updates:
            self.gradient_exchanges.after_step(optimizer)

    def on_step(self, warm: bool) -> None:
        if (turns := self.gradient_exchanges.turns) is not None:
            turns.stepped()
        for observer in self.run.observers if self.progress.lockstep else ():
            observer.merged(None, self.exchanger.sequence, {}, None)
        if warm:
            self.end_warmup(self.exchanger.meet(ExchangeHeader(kind=WARMUP_END, total=self.progress.steps)))
        elif self.block_exchanges is not None and not self.progress.lockstep:
            self.block_exchanges.advance(idle=False)
        if self.run.tuner.decided:
            self._retune(0)
        if self.run.tuner.measured.chooser is not None:
            self.follow_choice()

    def take_written(self) -> list[Fragment]:
        return self.blocks.take_written() if self.blocks is not None else []

    def retune(self) -> None:
        """Agree on the requested changes and apply them, between two exchanges."""
        self.run.tuner.exchange_requests(self.run.transport)
        self._retune(self._steps_of_blocks)

    def _retune(self, now: int) -> None:
        """Apply what was agreed on, if anything; `now` counts the steps since the first block began."""
        if self.run.tuner.decided:
            self.run.tuner.apply()
            self._change(self.run.rule, now)

    def retuned(self, rule: Rule) -> None:
        self._change(rule, self._steps_of_blocks)

    def _change(self, rule: Rule, now: int = 0) -> None:
        speeds = self.run.tuner.measured.speeds
        periods = speeds.periods(rule.blocks) if speeds is not None and rule.schedule.exchanges_blocks else ()
        if self.blocks is not None and (rule is not self.rule or periods != self.blocks.periods):
            self.blocks.retune(rule, now, periods)
        self.rule = rule

    @property
    def _steps_of_blocks(self) -> int:
        return self.blocks.schedule.steps if self.blocks is not None else 0

    def follow(self, rule: Rule) -> None:
        now = self.rule
        same = (rule.codec, rule.schedule.overlap) == (now.codec, now.schedule.overlap)
        if self.run.tuner.measured.chooser is None or (same and (self.blocks is not None) == self._builds(rule)):
            self._change(rule)
            self._follow_schedule(rule)
        else:
            self.adopt(rule)

    # -- collective calls -------------------------------------------------------------------------

    def merge(self) -> None:
        if self.global_model is not None and self.block_exchanges is not None:
            self.block_exchanges.merge()

    def end_pass(self) -> None:
        """A pass over shared data is over: wait until all workers are at its end, and hold the same."""
        if self.run.transport.world.size > 1:
            with self._gradients_aside():
                self._join(leaving=False)

    def shutdown(self) -> None:
        """End the run together: wait for workers that have more data, and merge the rest of the last block."""
        self._join(leaving=True)
        sums = [of_tensors(part) for part in self.fragments]
        if self.blocks is not None and not self.progress.lockstep:
            sums.append(torch.tensor(self.blocks.checksum()))
        # no exchange follows: this one compares the final bits of all workers
        header = ExchangeHeader(leaving=True, total=self.progress.steps, checksum=combine(sums))
        self._departures.check_ends(self.exchanger.meet(header), self.exchanger.transport.world)

    @contextlib.contextmanager
    def _gradients_aside(self) -> Iterator[None]:
        """Context in which no parameter has a gradient; restores those that the program has accumulated."""
        held = [(p, p.grad) for _, named in self.run.owned for _, p in named if p.grad is not None]
        for parameter, _ in held:
            parameter.grad = None
        try:
            yield
        finally:
            for _, named in self.run.owned:
                for _, parameter in named:
                    parameter.grad = None
            for parameter, gradient in held:
                parameter.grad = gradient

    def close(self) -> None:
        """Remove the hooks, and end the background threads."""
        if self.blocks is not None:
            self.blocks.release()
        exit_handling.release(self.run.owned)
        self.gradient_exchanges.close()
        for exchanger in self._exchangers:
            exchanger.close()

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        self.gradient_exchanges.withdraw()
        found: dict[str, Any] = {
            "blocks": saved_blocks.save(self.blocks) if self.blocks is not None else [],
            "gradients": [update.state() for update in self.gradient_exchanges.updates],
            "sequence": [exchanger.sequence for exchanger in self._exchangers],
        }
        if self.missed:
            found["missed"] = self.missed
        return found

    def load(self, state: dict[str, Any]) -> None:
        """Load a result of `state`; after the optimizers' own state."""
        self.missed = state.get("missed", 0)
        if self.blocks is not None:
            saved_blocks.load(self.blocks, state["blocks"])
        self._follow_progress()
        updates = self.gradient_exchanges.updates
        for update, row in zip(updates, state["gradients"], strict=False):  # none if it began with blocks
            update.load(row)
        for exchanger, sequence in zip(self._exchangers, state["sequence"], strict=True):
            exchanger.continue_at(sequence)

    def reshard(self, old: OldCheckpoint) -> Callable[[], None]:
        tuner = self.run.tuner
        rule = tuner.measured.rule_of(old.part(0, "tuning", "choice"))
        warming = rule.schedule.warmup > 0 and not old.part(0, "flow", 1)  # blocks have not begun
        blocks = None if warming else self.blocks or blocks_of(self.run, rule, self.exchanger)
        rows = saved_blocks.read(blocks, old) if blocks is not None else []
        if blocks is not None and blocks is not self.blocks:  # built to check the rows only
            blocks.release()
        sequence = int(old.part(0, "exchange", "sequence", 0) or 0)
        numbers = range(len(self.run.owned))
        gradients = [{name: old.part(0, "exchange", "gradients", k, name) for name in RESHARDED} for k in numbers]

        def put() -> None:
            if self.blocks is not None:
                saved_blocks.reshard(self.blocks, rows)
            else:
                for optimizer, _ in self.run.owned:
                    restore_beta1(optimizer)
            self._follow_progress()
            for update, row in zip(self.gradient_exchanges.updates, gradients, strict=False):
                if row["order"] is not None:
                    update.reshard(row)
            self.exchanger.continue_at(sequence)

        return put

    # -- exchanges --------------------------------------------------------------------------------

    @property
    def _exchangers(self) -> list[Exchanger]:
        return [self.exchanger] if self.host is None else [self.exchanger, self.host]

    @property
    def outer_fragments(self) -> list[Fragment]:
        """The tensors that must be equal on all workers when blocks begin or end."""
        return self.fragments if self.blocks is None else [state.fragment for state in self.blocks.outer_states]

    def end_warmup(self, summary: ExchangeSummary) -> None:
        """The warm-up is over: all workers, also leaving ones, take the same start for the first block."""
        progress = self.progress
        if (rule := self.run.tuner.take_choice()) is not None:
            self.adopt(rule)
        progress.end_warmup()
        if (blocks := self.blocks) is not None:
            if any(header.total for header in summary.headers):  # else it is as at attach
                for update in blocks.updates:
                    update.prepare()
                even_out(self.run.transport, summary, self.outer_fragments)
                blocks.capture()
            blocks.enter(progress.steps)
        self._leave_lockstep()
        self.gradient_exchanges.read_requests(summary)
        self._retune(0)

    # -- joining at the end of a pass, or of the run ------------------------------------------------

    def _join(self, leaving: bool) -> None:
        """At the end of the run if this worker is `leaving`, else of a pass: join exchanges until all are there."""
        self._joined = set[int]()  # the steps whose gradients were exchanged without this worker
        for withdrawn in self.gradient_exchanges.withdraw():
            self._joined |= {h.total for h in withdrawn.headers if h.brings}
        if leaving and self.block_exchanges is not None:
            self.block_exchanges.land_all()
        if self.progress.lockstep and self._join_lockstep(leaving):
            return
        if self.host is not None:
            self._join_host(self.host, leaving)
        if self.block_exchanges is not None:
            self._join_blocks(self.block_exchanges, leaving)

    def _join_lockstep(self, leaving: bool) -> bool:
        """Join the gradient exchanges of workers that have more data, until all are there or the warm-up is over;
        whether all are there."""
        while self.progress.lockstep:
            summary = self._join_gradients(self.exchanger, leaving)
            if any(h.kind == WARMUP_END for h in summary.headers):
                self.end_warmup(summary)
            elif summary.all_stand:
                self._even_out(self.exchanger.transport, summary, self.fragments)
                if (turns := self.gradient_exchanges.turns) is not None:
                    turns.begin(self.progress.steps + 1)
                if summary.all_leaving or not leaving:
                    return True
            elif (turns := self.gradient_exchanges.turns) is not None:
                turns.joined(summary)
            self._retune(0)
            measured = self.run.tuner.measured
            if measured.chosen is not None and measured.chosen.lockstep:
                self.follow_choice()  # but blocks begin when the others meet
        return False

    def _take_turns(self) -> None:
        """Workers take turns from now on, if the chosen synchronous steps begin with few at a time."""
        scaling, turns = self.run.tuner.tunables.rates.sync, None
        if scaling is not None and scaling.takes_turns and self.progress.lockstep:
            world, steps = self.run.transport.world, self.progress.steps
            turns = Turns(world, scaling.groups, self._join_turn, self._hand_on, steps)
        self.gradient_exchanges.take_turns(turns)
        self.run.loaders.wait_by(turns.wait if turns is not None else None)

    def _join_turn(self, stepped: bool) -> ExchangeSummary:
        """Join the next exchange without a gradient; `stepped`: this worker has made the step of its turn."""
        monitor = self.run.monitor
        monitor.begin()
        with self._gradients_aside():
            header = ExchangeHeader(kind=STEPPED if stepped else WAITING, total=self.progress.steps)
            summary = self.gradient_exchanges.join(self.exchanger.open(header))
        monitor.end(self.exchanger.timing, None, block=0, warmup=False)
        self._retune(0)
        return summary

    def _hand_on(self, source: int) -> None:
        """A worker gives all others what it has after its step."""
        agreement.broadcast_start(self.run.transport, self.fragments, source)
        self.handover.hand_on(source)

    def _join_host(self, host: Exchanger, leaving: bool) -> None:
        """Join the steps of this host, and its blocks, until all its processes are there; then hold the same values."""
        last = gradients_kind(len(self.run.owned) - 1)
        while True:
            summary = self._join_gradients(host, leaving)
            if summary.empty:
                if self.block_exchanges is not None and (summary.all_leaving or summary.steps_differ):
                    self.block_exchanges.land_all()
                self._even_out(host.transport, summary, self.outer_fragments)
                if summary.all_leaving or not leaving:
                    return
            elif self.block_exchanges is not None and summary.weight > 0 and summary.kind == last:
                self.block_exchanges.advance(idle=True)
            self._retune(0)

    def _join_gradients(self, exchanger: Exchanger, leaving: bool) -> ExchangeSummary:
        """Join an exchange of gradients with an empty contribution."""
        header = ExchangeHeader(leaving=leaving, minibatches=len(self._joined), total=self.progress.steps)
        summary = self.gradient_exchanges.join(exchanger.open(header))
        self._joined |= {h.total for h in summary.headers if h.brings}
        return summary

    def _join_blocks(self, blocks: BlockExchanges, leaving: bool) -> None:
        """Join the blocks of the others until all workers are there."""
        if leaving:
            blocks.finish()
            return
        summary = blocks.wait(self.progress.steps + self.missed)
        if len({h.at_end for h in summary.headers if h.place}) > 1:
            raise ElsewhereError(self.exchanger.transport.world.sign(CALLED_WITHIN))
        if summary.steps_differ or len({h.minibatches for h in summary.headers}) > 1:  # blocks are at other steps
            blocks.merge()
            totals, rank = [h.total for h in summary.headers], self.exchanger.transport.world.rank
            self.missed += max(totals) - totals[rank]
            if not any(h.leaving for h in summary.headers):
                self.handover.give(totals.index(max(totals)), totals[rank] < max(totals), state=False)

    # -- workers that have made fewer steps -------------------------------------------------------

    def _even_out(self, transport: Transport, summary: ExchangeSummary, fragments: Sequence[Fragment]) -> None:
        """Workers that made fewer steps take over from one that made the most."""
        totals, world = [h.total for h in summary.headers], transport.world
        most = max(totals)
        stayed = [rank for rank, h in enumerate(summary.headers) if h.total + h.minibatches < most]
        if stayed:
            raise MismatchError(world.sign(f"{world.names(stayed)} {SKIPPED}"))
        even_out(transport, summary, fragments)
        if summary.steps_differ and not summary.all_leaving:
            self.handover.give(totals.index(most), totals[world.rank] < most, transport)
            self.progress.follow(most)
            self._joined.clear()
            self._tell_skips(summary, most, world)

    def _tell_skips(self, summary: ExchangeSummary, most: int, world: World) -> None:
        """Say once that workers have skipped minibatches: what the program counts by itself lacks them."""
        places = [Place.unpack(h.place or pack(0, 0, INSIDE)) for h in summary.headers]
        furthest = places[[h.total for h in summary.headers].index(most)].batches
        missed = [max(0, furthest - place.batches) + (place.state == LEFT) for place in places]  # left before its step
        skips = [rank for rank, h in enumerate(summary.headers) if not h.leaving and most - h.total > missed[rank]]
        if skips and not self._told and world.rank == 0:
            logger.warning(
                "%s",
                world.sign(
                    f"{world.names(skips)} skipped minibatches of a pass, and made fewer steps than others: it takes "
                    "over their model, optimizer and schedules. What the program counts or averages by itself at each "
                    "step (a moving average of the weights) goes on without those steps"
                ),
            )
        self._told = self._told or bool(skips)

    # -- a rule that a probe chooses --------------------------------------------------------------

    def follow_choice(self) -> None:
        """After a step: let a choice of the rule take effect, if one was made."""
        choice = self.run.tuner.measured.chosen
        if choice is None:
            return
        if not choice.lockstep:
            self.end_warmup(self.exchanger.meet(ExchangeHeader(kind=WARMUP_END, total=self.progress.steps)))
        elif (rule := self.run.tuner.take_choice()) is not None:
            self.adopt(rule)

    def adopt(self, rule: Rule) -> None:
        """Continue with another schedule, codec or overlap; blocks, if there are any, begin again."""
        blocks, builds = None, self._builds(rule)
        if builds or self.block_exchanges is not None:
            old, self.exchanger = self.exchanger, self._connect(rule)
            self.exchanger.replace(old)
        if builds:
            blocks = blocks_of(self.run, rule, self.exchanger)
        self.rule = rule
        if self.blocks is not None:
            self.blocks.release()
        self._exchange_blocks(blocks)
        self._follow_schedule(rule)

    def _builds(self, rule: Rule) -> bool:
        """Whether there are blocks, or will be after a warm-up."""
        return rule.schedule.exchanges_blocks and not self.run.tuner.measured.probing

    def _follow_schedule(self, rule: Rule) -> None:
        if self.run.tuner.measured.chooser is None:
            return
        progress = self.progress
        progress.follow_schedule(rule.schedule, self._builds(rule))
        if progress.lockstep and not self.gradient_exchanges.running:
            self.gradient_exchanges.start(self.exchanger)
        self._take_turns()

    def _follow_progress(self) -> None:
        """After a warm-up gradients are exchanged within hosts only."""
        self._take_turns()
        chosen = self.run.tuner.measured.chooser is not None and not self.progress.lockstep
        if chosen or (self.progress.warm and self.rule.schedule.warmup):
            self._leave_lockstep()

    def _leave_lockstep(self) -> None:
        self.gradient_exchanges.stop()
        if self.host is not None:
            self.gradient_exchanges.start(self.host)


def even_out(transport: Transport, summary: ExchangeSummary, fragments: Sequence[Fragment]) -> None:
    """Workers that made fewer steps take the values of one that made the most; of buffers that are not averaged, which
    a program may write after its backward pass, all take that one's."""
    totals = [h.total for h in summary.headers]
    taken = fragments if len(set(totals)) > 1 else [part for part in fragments if part.from_rank_0]
    agreement.broadcast_start(transport, taken, totals.index(max(totals)))


def _what_all_share(run: RunContext) -> dict[str, Any]:
    settings = run.settings
    same: dict[str, Any] = {"seed": settings.seed, "outer_state": settings.outer_state, "guard": str(settings.guard)}
    devices = {torch.device("cpu")} if settings.outer_state == "host" else _devices(run)
    same[f"kernels ({kernels.SWITCH}=0 turns Triton's off)"] = kernels.arithmetic(devices)
    if (shards := Shards(parameter for _, named in run.owned for _, parameter in named)).any:
        same["shard"] = shards.place
    return same


def _devices(run: RunContext) -> set[torch.device]:
    return {parameter.device for _, named in run.owned for _, parameter in named}


def _within_host(run: RunContext) -> Exchanger | None:
    """The connection among the processes of this host, if any host has several."""
    hosts = run.transport.world.hosts
    names = list(dict.fromkeys(hosts))
    if len(names) == len(hosts):
        return None
    part = run.transport.part([[rank for rank, host in enumerate(hosts) if host == name] for name in names])
    everybody = part.world.size == run.transport.world.size  # these are the exchanges among all workers
    look = Departures(lambda: run.loaders.made).look
    reports = Reports(lambda: everybody and run.tuner.asks, run.loaders.place, look)
    return Exchanger(part, Dense(), Flat(run.rule.common.chunks), devices=_devices(run), reports=reports)


def blocks_of(run: RunContext, rule: Rule, exchanger: Exchanger) -> FragmentedModel | None:
    """The blocks; None where no worker exchanges any."""
    world = run.transport.world
    workers = len(set(world.hosts)) if rule.settings.within else world.size  # N, as the rule counts them
    if not rule.schedule.exchanges_blocks or not rule.exchanges_among(workers):
        return None
    return FragmentedModel(rule, exchanger, run, workers)
