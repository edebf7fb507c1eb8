# SPDX-License-Identifier: Apache-2.0
"""Chooses the rule after a probe, for the recipe `auto` (:mod:`paceline.rules.choice`).

Every worker times the steps of the probe. When it has enough, it says so in the header of its next exchange, as for a
request to tune; after that exchange all workers gather all measurements, and each makes the same choice. It takes
effect after the step: synchronous steps go on, or the warm-up ends and blocks begin. It stays for the run, and a run
that resumes from a checkpoint takes it over, whatever its number of workers.

In the first half of a probe gradients are exchanged after the backward pass, in the second half during it:

    c = the computing time of a step of the first half
    e = the exchange's time in the first half, without waiting for other workers
    x = the time of an exchange that is left in the second half, and what computing has slowed down by beyond 5 %

medians, and the first step of each half does not count. Medians of so few steps differ by 5 % without a cause.

Under a simulated clock an exchange is taken for a ring (:mod:`.period_controller`), and what the backward pass, two
thirds of a step, leaves of it is that of evenly spaced chunks:

    x = max(e / C, e - (1 - 1/C) (2/3) c)
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch

from paceline.communication import Transport
from paceline.communication.base import SoloTransport
from paceline.communication.virtual.clock import Clock
from paceline.core.optimizer_state import Owned
from paceline.rules import choice as choices
from paceline.rules.choice import BACKWARD, Choice, ProbeTimes
from paceline.rules.codec import Layout, codec_from_text
from paceline.rules.recipes import sync
from paceline.rules.rule import Rule
from paceline.rules.schedule import Probe
from paceline.rules.topology.base import DirectWire
from paceline.rules.traffic import bytes_per_block
from paceline.tuning.period_controller import block_bytes, ring_s

SLOWER = 1.05
SAMPLE = 1 << 20
"""Elements on which a codec is timed."""

StepTimes = tuple[float, float, float | None]
"""(c, e, x), seconds; x is None before the second half is over."""


class ProbeTimer(ABC):
    """Measures the steps of a probe on one worker."""

    @abstractmethod
    def stepped(self, steps: int) -> None:
        """A step of the probe was made, of which this worker has made `steps`."""

    @abstractmethod
    def measured(self) -> StepTimes | None:
        """The times; None before the first half is over."""

    @property
    @abstractmethod
    def early(self) -> bool:
        """Whether gradients are exchanged during the next backward pass."""

    def codec_s(self, codec: str, elements: int) -> float:
        """Seconds in which this worker writes and reads so many numbers; the simulated clock has no codecs."""
        return 0.0

    def resumed(self, made: int, steps: int) -> None:  # noqa: B027
        """Continue after `made` steps of the probe, and `steps` of this worker."""


class WallProbeTimer(ProbeTimer):
    """By the wall clock.

    Args:
        spent: total seconds of computing, of waiting for other workers, and of exchanging, up to the last exchange;
            the monitor updates this list in place.
        steps: of the probe.
        device: of the model, on which codecs are timed.
    """

    def __init__(self, spent: Sequence[float], steps: int, device: torch.device) -> None:
        self._spent, self._half, self._steps, self._device = spent, steps // 2, steps, device
        self._before = list(spent)
        self._rows: list[tuple[float, float]] = []

    def stepped(self, steps: int) -> None:
        now = list(self._spent)
        computed_s, _, exchanged_s = (after - was for after, was in zip(now, self._before, strict=True))
        self._before = now
        self._rows.append((computed_s, exchanged_s))

    @property
    def early(self) -> bool:
        return len(self._rows) >= self._half

    def measured(self) -> StepTimes | None:
        if len(self._rows) < self._half:
            return None
        after, during = self._rows[1 : self._half], self._rows[self._half + 1 :]
        step_s, exchange_s = median(c for c, _ in after), median(e for _, e in after)
        if len(self._rows) < self._steps:
            return step_s, exchange_s, None
        slower_s = median(c for c, _ in during) - SLOWER * step_s
        return step_s, exchange_s, median(e for _, e in during) + max(0.0, slower_s)

    def codec_s(self, codec: str, elements: int) -> float:
        size = min(elements, SAMPLE)
        return min(_seconds_of(codec, size, self._device) for _ in range(2)) * elements / max(1, size)


class SimulatedProbeTimer(ProbeTimer):
    """By the simulated clock; a function of the clock and of the count of steps alone.

    Args:
        clock: the cluster's.
        rank: this worker.
        workers: N.
        nbytes: that this worker sends in an exchange of gradients.
        chunks: C.
        steps: of the probe.
    """

    def __init__(self, clock: Clock, rank: int, workers: int, nbytes: int, chunks: int, steps: int) -> None:
        self._clock, self._rank, self._workers, self._nbytes = clock, rank, workers, nbytes
        self._chunks, self._half, self._probe = chunks, steps // 2, steps
        self._made = self._steps = 0

    def stepped(self, steps: int) -> None:
        self._made, self._steps = self._made + 1, steps

    def resumed(self, made: int, steps: int) -> None:
        self._made, self._steps = made, steps

    @property
    def early(self) -> bool:
        return self._made >= self._half

    def measured(self) -> StepTimes | None:
        if self._made < self._half:
            return None
        step_s = median(
            self._clock.compute_s(self._rank, step) for step in range(self._steps - self._half, self._steps)
        )
        gradient_s = ring_s(self._clock, self._rank, self._workers, self._nbytes, self._steps)
        if self._made < self._probe:
            return step_s, gradient_s, None
        return step_s, gradient_s, exposed_s(gradient_s, self._chunks, step_s)


def exposed_s(gradient_s: float, chunks: int, step_s: float) -> float:
    """x, what the backward pass leaves of an exchange of gradients in evenly spaced chunks."""
    return max(gradient_s / chunks, gradient_s - (1 - 1 / chunks) * BACKWARD * step_s)


def _seconds_of(codec: str, elements: int, device: torch.device) -> float:
    """Seconds of one exchange of so many numbers, of which none leaves the worker."""
    x = torch.full((elements,), 1e-3, device=device)
    float(x[0])
    began = time.perf_counter()
    for _ in codec_from_text(codec).exchange(x, Layout.vector(elements), DirectWire(SoloTransport(), False), {}):
        pass
    float(x[0])  # waits for queued kernels
    return time.perf_counter() - began


LEAST_ELEMENTS = 1 << 18
"""The least elements of a chunk (:mod:`paceline.update.engine.blocks.outer_state`)."""


@dataclass(frozen=True)
class ProbedModel:
    """What a probe needs to know of the model.

    Attributes:
        workers: N.
        elements: of the trained parameters.
        gradient_bytes: that rank 0 sends in an exchange of gradients, for the same choice on all workers.
        block_bytes: codec -> those of a block; one under the name "" where the codec is given.
    """

    workers: int
    elements: int
    gradient_bytes: int
    block_bytes: Mapping[str, int]

    @classmethod
    def of(cls, rule: Rule, transport: Transport, owned: Owned, buffers: int) -> ProbedModel:
        """The model of these optimizers under the rule that was asked for."""
        world = transport.world
        layout = Layout.of(tuple(p.shape) for _, named in owned for _, p in named)
        gradients = bytes_per_block(sync(), world.size, layout, buffers, 0, hosts=world.hosts)
        probe = rule.paced.probe
        assert probe is not None
        rules = {"": rule}
        if probe.codec:
            rules = {codec: replace(rule, codec=codec_from_text(codec)) for codec, _ in choices.LADDER}
        sent = {codec: block_bytes(one, world, owned, buffers, 0) for codec, one in rules.items()}
        kept = choices.worth_it(sent) if probe.codec else list(sent)
        return cls(world.size, layout.numel, gradients, {codec: sent[codec] for codec in kept})

    def chunks(self, rule: Rule) -> int:
        """The number of chunks of an exchange of gradients."""
        return max(1, min(rule.common.chunks, self.elements // LEAST_ELEMENTS))


class RuleChooser:
    """One worker's measurements in a probe, and the agreement on a rule.

    Args:
        asked: the rule that was asked for.
        timer: makes a timer of the probe's steps.
        model: what is exchanged.
        probes: whether gradients can be exchanged; else it begins with blocks.

    Attributes:
        choice: what was chosen; None before.
        pending: whether the choice has not taken effect yet.
        gave_up: whether it was chosen without times.
        began: this worker's steps before the probe.
    """

    def __init__(self, asked: Rule, timer: Callable[[], ProbeTimer], model: ProbedModel, probes: bool) -> None:
        self.asked, self._new_timer, self._model, self.probes = asked, timer, model, probes
        self.choice: Choice | None = None
        self.pending = self.gave_up = False
        self.began = self._steps = self._chosen_at = 0
        self._probing = probes
        self._timer = timer()

    @property
    def probing(self) -> bool:
        """Whether the probe is under way."""
        return self._probing and self.choice is None

    @property
    def early(self) -> bool:
        """Whether gradients are exchanged during the next backward pass."""
        return not self.probing or self._timer.early

    @property
    def rule(self) -> Rule:
        """The present rule, without later changes of its numbers."""
        return self._rule(self._probing, self.choice, self._chosen_at)

    def rule_of(self, saved: Mapping[str, Any] | None) -> Rule:
        """The rule of a result of `state`; None is that of a run that began with blocks."""
        if saved is None:
            return self._rule(False, None, 0)
        chosen = Choice(**saved["choice"]) if saved["choice"] is not None else None
        return self._rule(bool(saved["probing"]), chosen, int(saved["at"]))

    def _rule(self, probing: bool, chosen: Choice | None, at: int) -> Rule:
        if chosen is not None:
            return choices.chosen_rule(self.asked, chosen, at)
        return replace(self.asked, schedule=self.asked.paced.probed()) if probing else choices.without_probe(self.asked)

    @property
    def _probe(self) -> Probe:
        probe = self.asked.paced.probe
        assert probe is not None
        return probe

    # -- measuring --------------------------------------------------------------------------------

    def stepped(self, steps: int) -> None:
        """A step was made; this worker has made `steps`."""
        self._steps = steps
        if self.probing and steps > self.began:
            self._timer.stepped(steps)

    @property
    def due(self) -> bool:
        """Whether it is time to gather the measurements."""
        if not self.probing or self._steps - self.began < self.asked.schedule.warmup:
            return False
        times = self._timer.measured()
        return times is not None and (times[2] is not None or times[1] > choices.HOPELESS * times[0])

    def measurements(self) -> list[Any] | None:
        """This worker's measurements as JSON values; None before there are enough."""
        times = self._timer.measured() if self.probing else None
        if times is None:
            return None
        step_s, exchange_s, exposed_s = times
        byte_s = exchange_s / max(1, self._model.gradient_bytes)
        ahead = [nbytes * byte_s + self._codec_s(codec) for codec, nbytes in self._model.block_bytes.items()]
        return [step_s, exchange_s, exposed_s, ahead, self._steps]

    def _codec_s(self, codec: str) -> float:
        return 0.0 if codec in ("", "dense") else self._timer.codec_s(codec, self._model.elements)

    # -- choosing ---------------------------------------------------------------------------------

    def agree(self, rows: Sequence[Any]) -> None:
        """Choose, the same on every worker, or wait for more steps; `rows`: `measurements` of each worker."""
        measured = [row for row in rows if row]
        if not measured or not self.probing:
            return
        step_s, gradient_s, exposed_s, blocks = choices.merged(measured)
        times = ProbeTimes(step_s, gradient_s, exposed_s, dict(zip(self._model.block_bytes, blocks, strict=True)))
        choice = choices.choose(times, self.asked.paced)
        if choice is not None:
            self._take(choice, 1 + max(int(row[4]) for row in measured))  # it takes effect after the present step

    def give_up(self, why: str, steps: int) -> None:
        """Begin blocks now, as if there had been no probe."""
        schedule = self.asked.paced
        codec = "dense" if self._probe.codec else ""
        why_blocks = f"blocks of {schedule.period} minibatches without a probe: {why}"
        self._take(Choice(False, codec, schedule.period, schedule.overlap, why_blocks), steps)
        self.gave_up = True

    def _take(self, choice: Choice, steps: int) -> None:
        self.choice, self.pending, self._chosen_at = choice, True, steps

    @property
    def rate_factor(self) -> float:
        """N^s, by which the learning rate of one worker is multiplied; 1 in blocks."""
        return float(self._model.workers**self._probe.rate) if self.choice is not None and self.choice.lockstep else 1.0

    # -- checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """State for a checkpoint."""
        return {
            "probing": self._probing,
            "choice": self.choice.json() if self.choice is not None else None,
            "at": self._chosen_at,
            "began": self.began,
            "factor": self.rate_factor,
        }

    def load(self, state: Mapping[str, Any] | None, steps: int) -> None:
        """Restore `state`; None is that of a run that began with blocks. Times are measured again."""
        saved = state or {"probing": False, "choice": None, "at": 0, "began": 0}
        self._probing, self.pending = bool(saved["probing"]) and self.probes, False
        self.choice = Choice(**saved["choice"]) if saved["choice"] is not None else None
        self._chosen_at, self.began, self._steps = int(saved["at"]), int(saved["began"]), steps
        self._timer = self._new_timer()
        self._timer.resumed(steps - self.began, steps)

    def renew(self, steps: int) -> None:
        """Begin the probe after `steps` steps: the number of workers is another."""
        self.load({"probing": self.probes, "choice": None, "at": 0, "began": steps}, steps)


def rule_chooser_for(
    rule: Rule, transport: Transport, owned: Owned, buffers: int, spent: Sequence[float], probes: bool
) -> RuleChooser | None:
    """The chooser of one of several workers; None under rules that no probe chooses.

    Args:
        rule: that was asked for.
        buffers: elements of averaged buffers.
        spent: total seconds of computing, of waiting for other workers, and of exchanging; updated in place.
        probes: whether gradients can be exchanged.
    """
    probe = rule.schedule.probe
    if probe is None:
        return None
    model, steps = ProbedModel.of(rule, transport, owned, buffers), probe.steps
    world, cluster = transport.world, transport.cluster
    device = next(parameter.device for _, named in owned for _, parameter in named)

    def timer() -> ProbeTimer:
        if cluster is None or not cluster.timed:
            return WallProbeTimer(spent, steps, device)
        nbytes = model.gradient_bytes
        return SimulatedProbeTimer(cluster.clock, world.rank, world.size, nbytes, model.chunks(rule), steps)

    return RuleChooser(rule, timer, model, probes and (cluster is None or cluster.timed))
