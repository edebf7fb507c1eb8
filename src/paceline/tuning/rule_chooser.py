# SPDX-License-Identifier: Apache-2.0
"""Chooses the rule after a probe, for the recipe `auto` (:mod:`paceline.rules.choice`).

Every worker times the steps of the probe (:mod:`.probe_timers`). When it has enough, it says so in the header of its
next exchange, as for a request to tune; after that exchange all workers gather all measurements, and each makes the
same choice. It takes effect after the step: synchronous steps go on, or the warm-up ends and blocks begin. It stays for
the run, and a run that resumes from a checkpoint takes it over, whatever its number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from paceline.communication import Transport
from paceline.core.optimizer_state import Owned
from paceline.rules import choice as choices
from paceline.rules.choice import Choice, ProbeTimes
from paceline.rules.codec import Layout, codec_from_text
from paceline.rules.recipes import sync
from paceline.rules.rule import Rule
from paceline.rules.schedule import Probe
from paceline.rules.traffic import bytes_per_block
from paceline.tuning.period_controller import block_bytes
from paceline.tuning.probe_timers import ProbeTimer, SimulatedProbeTimer, WallProbeTimer

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
        found = self._timer.measured()
        return found is not None and (found[2] is not None or found[1] > choices.HOPELESS * found[0])

    def said(self) -> list[Any] | None:
        """This worker's measurements as JSON values; None before there are enough."""
        found = self._timer.measured() if self.probing else None
        if found is None:
            return None
        step_s, exchange_s, exposed_s = found
        byte_s = exchange_s / max(1, self._model.gradient_bytes)
        ahead = [nbytes * byte_s + self._codec_s(codec) for codec, nbytes in self._model.block_bytes.items()]
        return [step_s, exchange_s, exposed_s, ahead, self._steps]

    def _codec_s(self, codec: str) -> float:
        return 0.0 if codec in ("", "dense") else self._timer.codec_s(codec, self._model.elements)

    # -- choosing ---------------------------------------------------------------------------------

    def agree(self, rows: Sequence[Any]) -> None:
        """Choose, the same on every worker, or wait for more steps; `rows`: `said` of each worker."""
        measured = [row for row in rows if row]
        if not measured or not self.probing:
            return
        step_s, gradient_s, exposed_s, blocks = choices.merged(measured)
        times = ProbeTimes(step_s, gradient_s, exposed_s, dict(zip(self._model.block_bytes, blocks, strict=True)))
        found = choices.choose(times, self.asked.paced)
        if found is not None:
            self._take(found, 1 + max(int(row[4]) for row in measured))  # it takes effect after the present step

    def give_up(self, why: str, steps: int) -> None:
        """Begin blocks now, as if there had been no probe."""
        schedule = self.asked.paced
        codec = "dense" if self._probe.codec else ""
        told = f"blocks of {schedule.period} minibatches without a probe: {why}"
        self._take(Choice(False, codec, schedule.period, schedule.overlap, told), steps)
        self.gave_up = True

    def _take(self, found: Choice, steps: int) -> None:
        self.choice, self.pending, self._chosen_at = found, True, steps

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
        """Restore `state`; None is that of a run that began with blocks. Times are measured anew."""
        saved = state or {"probing": False, "choice": None, "at": 0, "began": 0}
        self._probing, self.pending = bool(saved["probing"]) and self.probes, False
        self.choice = Choice(**saved["choice"]) if saved["choice"] is not None else None
        self._chosen_at, self.began, self._steps = int(saved["at"]), int(saved["began"]), steps
        self._timer = self._new_timer()
        if isinstance(self._timer, SimulatedProbeTimer):
            self._timer.resumed(steps - self.began, steps)

    def renew(self, steps: int) -> None:
        """Begin the probe after `steps` steps: the number of workers is another."""
        self.load({"probing": self.probes, "choice": None, "at": 0, "began": steps}, steps)


def rule_chooser_for(
    rule: Rule,
    transport: Transport,
    owned: Owned,
    buffers: int,
    spent: Sequence[float],
    probes: bool,
) -> RuleChooser | None:
    """The chooser of one of several workers; None under rules that no probe chooses.

    Args:
        rule: that was asked for.
        transport: the connection.
        owned: (optimizer, its named parameters) pairs.
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
