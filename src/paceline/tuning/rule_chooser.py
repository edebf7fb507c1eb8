# SPDX-License-Identifier: Apache-2.0
"""Chooses the rule after a probe, for the recipe `auto` (:mod:`paceline.rules.choice`).

Every worker times the steps of the probe, which exchange gradients after the backward pass: exchanges of the model's
own size, over the real route. When it has enough, it says so in the header of its next exchange, as for a request to
tune; after that exchange all workers gather all measurements, and each makes the same choice. It takes effect after the
step: synchronous steps go on, or the warm-up ends and blocks begin. It stays for the run. A run that resumes from a
checkpoint takes it over, whatever its number of workers, and so does one that is started again, from the log.

    c = the median of the computing time of a step
    e = the least time of an exchange, without waiting for other workers

The first step does not count, while connections are set up. Then the workers make further exchanges of that size, for
`MORE_S`, because something else on a machine can disturb ten steps in a row. Under a simulated clock an exchange is
taken for a ring (:mod:`.period_controller`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from paceline.communication import Transport
from paceline.communication.virtual.clock import Clock
from paceline.core.optimizer_state import Owned, moments
from paceline.core.world import World
from paceline.rules import choice as choices
from paceline.rules.choice import Choice, Measured
from paceline.rules.codec import Layout
from paceline.rules.recipes import sync
from paceline.rules.rule import Rule
from paceline.rules.schedule import Probe
from paceline.rules.schedule.uneven import shortest
from paceline.rules.traffic import bytes_per_block
from paceline.tuning.period_controller import PeriodController, Times, block_timer, simulated
from paceline.tuning.speeds import Speeds
from paceline.tuning.sync_scaling import SyncScaling


class WallProbeTimer:
    """By the wall clock; `spent` are the monitor's total seconds of computing, waiting and exchanging, which it updates
    in place, and `steps` those of the probe."""

    def __init__(self, spent: Sequence[float], steps: int) -> None:
        self._spent, self._steps = spent, steps
        self._before = list(spent)
        self._rows: list[Times] = []

    def stepped(self, steps: int) -> None:
        """A step of the probe was made, of which this worker has made `steps`."""
        now = list(self._spent)
        computed_s, _, exchanged_s = (after - was for after, was in zip(now, self._before, strict=True))
        self._before = now
        self._rows.append((exchanged_s, computed_s))

    def measured(self) -> Times | None:
        """(e, c), seconds; None before the probe is over."""
        if len(self._rows) < self._steps:
            return None
        return min(e for e, _ in self._rows[1:]), median(c for _, c in self._rows[1:])


class SimulatedProbeTimer:
    """By the simulated clock, after `made` of `probe` steps; each worker sends `nbytes` in an exchange of gradients."""

    def __init__(self, clock: Clock, world: World, nbytes: int, probe: int, made: int) -> None:
        self._clock, self._world, self._nbytes, self._probe = clock, world, nbytes, probe
        self._made = self._steps = made

    def stepped(self, steps: int) -> None:
        self._made, self._steps = self._made + 1, steps

    def measured(self) -> Times | None:
        if self._made < self._probe:
            return None
        steps = range(self._steps - self._probe + 1, self._steps)
        return simulated(self._clock, self._world.rank, self._world.size, self._nbytes, steps, steps)


SLOW = 2.0
"""So many times as long as the fastest worker the slowest takes where all should not wait for it at each step."""
MORE_S, MORE = 0.5, 200
"""Seconds of further exchanges, and the most of them."""
MOST_ELEMENTS = 1 << 24
"""Of a larger model a part is exchanged."""
LEAST_ELEMENTS = 1 << 18
"""The least elements of a chunk (:mod:`paceline.update.engine.blocks.outer_state`)."""


@dataclass(frozen=True)
class Measures:
    """What is measured on one worker.

    Attributes:
        transport: to the other workers.
        owned: the optimizers and their parameters.
        buffers: returns the elements of averaged buffers.
        spent: total seconds of computing, of waiting and of exchanging; the monitor updates this list in place.
        of_blocks: as for :class:`.period_controller.WallTimer`.
        minibatches: returns how many this worker makes in a pass; None while it does not know.
        can_wait: returns whether workers can take turns, since the program asks paceline for each batch.
        furthest, deal: as for :class:`.speeds.Speeds`.
    """

    transport: Transport
    owned: Owned
    buffers: Callable[[], int]
    spent: Sequence[float]
    of_blocks: Sequence[float]
    minibatches: Callable[[], int | None]
    can_wait: Callable[[], bool]
    furthest: Callable[[], Any]
    deal: Callable[[tuple[int, ...], list[Any]], bool]

    def layout(self) -> Layout:
        """Of the trained parameters."""
        return Layout.of(tuple(p.shape) for _, named in self.owned for _, p in named)

    def block_bytes(self, rule: Rule, rank: int) -> int:
        """That worker `rank` sends for one exchange of the whole model."""
        world, buffers = self.transport.world, self.buffers()
        for optimizer, named in self.owned:
            if rule.delta.resolve(optimizer) in ("average", "compensate"):
                buffers += len(moments(optimizer)) * sum(p.numel() for _, p in named)
        return bytes_per_block(rule, world.size, self.layout(), buffers, 0, rank=rank, hosts=world.hosts)

    def speeds(self) -> Speeds | None:
        """Of the workers; None among virtual ones without a clock."""
        world, timer = self.transport.world, block_timer(self.transport, self.of_blocks, lambda: 0, 1, 1, 3)
        return Speeds(timer, world.rank, world.size, self.furthest, self.deal) if timer is not None else None

    def controller(self, rule: Rule, timed: bool, overlaps: bool) -> PeriodController:
        """Of a rule whose period follows times, which have chosen it already if `timed`."""
        timer = block_timer(self.transport, self.of_blocks, lambda: self.block_bytes(rule, self.transport.world.rank))
        return PeriodController(timer, self.minibatches, timed, overlaps and rule.schedule.overlap > 0)


def kind_of(rule: Rule, owned: Owned) -> str:
    """The recipe that makes the same blocks for these optimizers."""
    return "bmuf_adam" if {rule.delta.resolve(one) for one, _ in owned} == {"compensate"} else "bmuf"


BLOCKS_ONLY: Mapping[str, Any] = {"probing": False, "choice": None, "at": 0, "began": 0}


class RuleChooser:
    """One worker's measurements in a probe, and the agreement on a rule.

    Args:
        asked: the rule that was asked for.
        measures: what is measured.
        log: the log directory, if any, by which a run that is started again takes over its choice.
        unprobed: why gradients cannot be exchanged, so that it begins with blocks; empty if they can.

    Attributes:
        choice: what was chosen; None before.
        pending: whether the choice has not taken effect yet.
        gave_up: whether the probe ended before its last step.
        began: this worker's steps before the probe.
    """

    def __init__(self, asked: Rule, measures: Measures, log: str | Path | None, unprobed: str) -> None:
        self.asked, self._measures, self.unprobed = asked, measures, unprobed
        self._world, self._probe = measures.transport.world, asked.schedule.probe or Probe()
        self._kind, self._earlier = kind_of(asked, measures.owned), earlier_choice(log, self._world.rank)
        self.choice: Choice | None = None
        self.pending = self.gave_up = False
        self.began = self._steps = self._chosen_at = 0
        self._probing = not unprobed
        layout, hosts = measures.layout(), self._world.hosts
        self._elements, self._device = layout.numel, next(p.device for _, named in measures.owned for _, p in named)
        # what rank 0 sends, for the same choice on all workers
        self._gradient_bytes = bytes_per_block(sync(), self._world.size, layout, measures.buffers(), 0, hosts=hosts)
        self._sizes = choices.block_sizes(asked, lambda rule: measures.block_bytes(rule, 0), self._gradient_bytes)
        hides = measures.transport.cluster is not None or self._device.type != "cpu"  # a CPU has to make both
        self._chunks = max(1, min(asked.common.chunks, self._elements // LEAST_ELEMENTS)) if hides else 1
        self._timer = self._new_timer(0)
        self._least_s: float | None = None  # of further exchanges, of the slowest worker

    def _new_timer(self, made: int) -> WallProbeTimer | SimulatedProbeTimer:
        """Of the probe's steps, of which so many were made before."""
        if (cluster := self._measures.transport.cluster) is None:
            return WallProbeTimer(self._measures.spent, self._probe.steps)
        return SimulatedProbeTimer(cluster.clock, self._world, self._gradient_bytes, self._probe.steps, made)

    @property
    def probing(self) -> bool:
        return self._probing and self.choice is None

    @property
    def rule(self) -> Rule:
        """The present rule, without later changes of its numbers."""
        return self.rule_of(self.state())

    def rule_of(self, saved: Mapping[str, Any] | None) -> Rule:
        """The rule of a result of `state`; None is that of a run that began with blocks."""
        saved = saved or BLOCKS_ONLY
        if saved["choice"] is not None:
            return choices.chosen_rule(self.asked, Choice(**saved["choice"]), int(saved["at"]), self._kind)
        if saved["probing"]:
            return replace(self.asked, schedule=self.asked.paced.probed())
        return choices.without_probe(self.asked)

    # -- measuring --------------------------------------------------------------------------------

    def stepped(self, blocks: int, steps: int) -> None:
        self._steps = steps
        if self.probing and steps > self.began:
            self._timer.stepped(steps)

    @property
    def due(self) -> bool:
        over = self._steps - self.began >= self.asked.schedule.warmup
        return self.probing and over and self._timer.measured() is not None

    def measurements(self) -> list[Any] | None:
        """This worker's measurements as JSON values; None before there are enough."""
        if not self.probing or (times := self._timer.measured()) is None:
            return None
        return [*times, self._measures.minibatches(), self._steps, self._earlier, self._measures.can_wait()]

    # -- choosing ---------------------------------------------------------------------------------

    def agree(self, rows: Sequence[Any]) -> None:
        """Choose, the same on every worker, or wait for more steps; `rows`: `measurements` of each worker."""
        measured = [row for row in rows if row]
        if not measured or not self.probing:
            return
        at = 1 + max(int(row[3]) for row in measured)  # it takes effect after the present step
        earlier = next((row[4] for row in measured if row[4] is not None), None)
        if earlier is not None:
            self._take(Choice(**earlier), at)
            return
        times = Measured(median(row[1] for row in measured), self._least_s or max(row[0] for row in measured))
        times = replace(times, minibatches=choices.least_known(row[2] for row in measured))
        seconds, uneven = [float(row[1]) for row in measured], ""
        if not self.asked.settings.even and max(seconds) > SLOW * min(seconds) > 0:
            uneven = f"the slowest worker takes {max(seconds) / min(seconds):.2g} times as long as the fastest"
        chosen = choices.choose(times, self.asked.paced, self._sizes, self._chunks, uneven)
        if uneven:
            longest = self.asked.paced.pace.longest
            chosen = replace(chosen, period=min(longest, max(chosen.period, shortest(seconds))))
        chosen = replace(chosen, turns=chosen.lockstep and all(row and row[5] for row in rows))
        self._take(chosen, at)
        if self.scaling is not None and times.minibatches:
            faster = self.scaling.speed_up(times.minibatches) / (1 + times.exact)
            passes = f"a first pass of {times.minibatches} minibatches is {faster:.3g} times as fast as alone"
            self._take(replace(chosen, why=f"{chosen.why}, and {passes}"), at)

    def time_more(self, transport: Transport, rows: Sequence[Any]) -> None:
        """Time further exchanges, together with all workers; `rows`: `measurements` of each."""
        self._least_s = None
        if transport.cluster is not None or not all(rows):
            return
        least_s = max(float(row[0]) for row in rows)
        elements = min(self._elements, MOST_ELEMENTS)
        part = elements / max(1, self._elements)
        x = torch.zeros(elements, device=transport.wire_device(self._device))
        for _ in range(min(MORE, int(MORE_S / max(1e-9, least_s * part)))):
            began = transport.now()
            transport.all_reduce(x).wait()
            float(x[0])  # waits for a device
            least_s = min(least_s, (transport.now() - began) / part)
        self._least_s = max(transport.gather_json(least_s))

    def give_up(self, why: str, steps: int) -> None:
        """Begin blocks now, as if there had been no probe."""
        schedule = self.asked.paced
        codec = "dense" if self._probe.codec else ""
        self._take(Choice(False, codec, schedule.period, schedule.overlap, f"no probe is possible: {why}", True), steps)
        self.gave_up = True

    def _take(self, choice: Choice, steps: int) -> None:
        self.choice, self.pending, self._chosen_at = choice, True, steps

    @property
    def scaling(self) -> SyncScaling | None:
        """Of the optimizers in synchronous steps that were chosen; None else, and where they are left as they are."""
        synchronous = self.choice is not None and self.choice.lockstep and self._probe.rate != 0
        began = self._chosen_at if self.choice is not None and self.choice.turns else None
        return SyncScaling(self._world.size, self._probe.rate, began) if synchronous else None

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        choice = self.choice.json() if self.choice is not None else None
        return {"probing": self._probing, "choice": choice, "at": self._chosen_at, "began": self.began}

    def load(self, state: Mapping[str, Any] | None, steps: int) -> None:
        """Restore `state`; None is that of a run that began with blocks. Times are measured again."""
        saved = state or BLOCKS_ONLY
        self._probing, self.pending = bool(saved["probing"]) and not self.unprobed, False
        self.choice = Choice(**saved["choice"]) if saved["choice"] is not None else None
        self._chosen_at, self.began, self._steps = int(saved["at"]), int(saved["began"]), steps
        self._timer = self._new_timer(steps - self.began)

    def renew(self, steps: int) -> None:
        """Begin the probe after `steps` steps: the number of workers is another."""
        self.load({"probing": True, "choice": None, "at": 0, "began": steps}, steps)


def earlier_choice(log: str | Path | None, rank: int) -> dict[str, Any] | None:
    """What an earlier start of this run has chosen last, by its log; None in a first start."""
    found = None
    if log is not None and os.environ.get("PACELINE_RESTART", "0") != "0":
        for path in sorted(Path(log).glob(f"rank-{rank:03d}*.jsonl"), key=lambda path: path.stat().st_mtime):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if '"choice": {' in line and line.endswith("}"):
                    found = json.loads(line)["choice"]
    return found
