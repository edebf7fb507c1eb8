# SPDX-License-Identifier: Apache-2.0
"""A shard of the parameters at its owner: values, the optimizer over them, and the number of updates.

Shards are independent of one another. A push is applied under the shard's lock, so that a pull sees all of an update or
nothing of it; between shards there is no such order, as in any sharded parameter server.

Bounded staleness: the clock of each worker, and which workers may go on.

    a worker at clock c may start its next step iff  c - min_i c_i <= s

The minimum is over the workers that take part; a worker that is done or lost leaves it. The values that a worker reads
when it may start contain every update of clocks up to c - s - 1, and its own, because an owner answers a worker's push
with values that contain it. Source: Q. Ho et al., NIPS 2013 (stale synchronous parallel). Earlier implementations
deadlocked where finished workers stayed in the minimum.

Every worker numbers its pushes by its clock. A push whose number the shard has already was sent again, because an owner
was lost before the sender knew that a replica holds the push. So sending a push again is harmless.

The last push of a worker that dies may have reached only some shards. Its samples go to another worker, which pushes
them to all shards; those that have them already skip them. So each shard remembers which samples are in it. Such
samples are pushed again one minibatch at a time (:mod:`.ledger_client`), so that a shard has all of a push or none.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.ledger import Ledger
from paceline.data.ledger.ranges import Ranges
from paceline.rules.outer import Arrival, Elastic, Push
from paceline.rules.schedule.bounded import Bounded

T = TypeVar("T")


class WorkerClocks:
    """The clocks of the workers, as one shard has seen them."""

    def __init__(self, schedule: Bounded, workers: Iterable[int]) -> None:
        self._schedule = schedule
        self._clocks = dict.fromkeys(workers, 0)
        self._idle: dict[int, int] = {}
        self._left: dict[int, int] = {}

    def sharing(self, clock: int) -> int:
        """N of a push that brings its worker to `clock`: the workers that reach this clock, at least 1.

        Those are all that take part, and those that had reached it when they left: equal workers end one after another,
        and the last one's push still counts as one of N.
        """
        past = sum(own >= clock for own in self._left.values())
        return max(1, len(self._clocks) + len(self._idle) + past)

    @property
    def slowest(self) -> int | None:
        """The least clock; None when all workers have left."""
        return min(self._clocks.values(), default=None)

    @property
    def first(self) -> int | None:
        """The lowest rank that takes part; None when all workers have left."""
        return min([*self._clocks, *self._idle], default=None)

    def tick(self, rank: int, clock: int) -> None:
        """Note that worker `rank` has reached `clock`; clocks never go back."""
        if rank in self._idle:
            self._clocks[rank] = self._idle.pop(rank)
        if rank in self._clocks:
            self._clocks[rank] = max(self._clocks[rank], clock)
        elif rank in self._left:
            self._left[rank] = max(self._left[rank], clock)

    def leave(self, rank: int) -> None:
        """Leave worker `rank` out of the minimum: it is done or lost."""
        for there in (self._clocks, self._idle):
            if rank in there:
                self._left[rank] = there.pop(rank)

    def idle(self, rank: int) -> None:
        """Let no worker wait for worker `rank` until its next push."""
        if rank in self._clocks:
            self._idle[rank] = self._clocks.pop(rank)

    def may_start(self, rank: int) -> bool:
        slowest = self.slowest
        if slowest is None or rank not in self._clocks:
            return True
        return self._schedule.may_start(self._clocks[rank], slowest)

    def holding_up(self, rank: int) -> list[int]:
        """The workers that `rank` has to wait for."""
        own = self._clocks.get(rank, 0)
        return [other for other, clock in self._clocks.items() if not self._schedule.may_start(own, clock)]

    def state(self) -> list[list[int]]:
        """(rank, clock) pairs, for a replica or a checkpoint."""
        return [[rank, clock] for rank, clock in (self._clocks | self._idle | self._left).items()]

    def load(self, state: Iterable[Iterable[int]]) -> None:
        """Restore clocks; the workers that take part stay the same."""
        for rank, clock in state:
            self.tick(rank, clock)


EPOCHS = 8
"""Epochs of a loader whose samples are remembered; an epoch begins when the one before it is in every shard."""


class PushNumbers:
    """The pushes that one shard has seen."""

    def __init__(self) -> None:
        self.applied: dict[int, int] = {}  # sender -> number of its last push
        self.repeated = 0  # samples that are in the shard twice, because they came again together with new ones
        self._covered: dict[tuple[int, int], Ranges] = {}

    def is_new(self, sender: int, number: int, marks: Iterable[Sequence[int]]) -> bool:
        """Note a push, by its number (from 1 on; 0: not counted) and its samples; whether to apply it."""
        if number:
            if number <= self.applied.get(sender, 0):
                return False
            self.applied[sender] = number
        samples = new = 0
        for loader, epoch, begin, end in marks:
            key = loader, epoch
            if key not in self._covered:
                self._covered[key] = Ranges()
                for old in sorted(key for key in self._covered if key[0] == loader)[:-EPOCHS]:
                    del self._covered[old]
            samples += end - begin
            new += self._covered[key].add(begin, end)
        if samples and not new:
            return False
        self.repeated += samples - new
        return True

    def take_repeated(self) -> int:
        """Samples that were applied twice since the last call."""
        found, self.repeated = self.repeated, 0
        return found

    def marks(self) -> list[Mark]:
        """The samples that are in the shard, of the last epochs."""
        return [(*key, begin, end) for key, places in self._covered.items() for begin, end in places]

    def state(self) -> dict[str, Any]:
        """The state for a replica or a checkpoint, as JSON types."""
        covered = [[list(key), places.state()] for key, places in self._covered.items()]
        return {"applied": [list(pair) for pair in self.applied.items()], "covered": covered}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave; {} for no pushes."""
        self.applied = {sender: number for sender, number in state.get("applied", ())}
        self._covered = {(key[0], key[1]): Ranges(places) for key, places in state.get("covered", ())}


LOCAL_SETTINGS = ("params", "foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer's group that concern its own tensors and not the method."""

GroupSettings = dict[str, Any]


@dataclass
class IncomingPush:
    """What a worker says about a push to one shard."""

    sender: int  # its rank
    clock: int  # that it reaches with this push; 1 for the first push
    version: int  # of the values at which the push was computed
    minibatches: int  # that the push counts for
    settings: GroupSettings = field(default_factory=dict)  # of the optimizer's group at the sender (learning rate, ...)
    marks: Sequence[Sequence[int]] = ()  # (loader, epoch, begin, end): sample ranges that the push was computed on


class UpdateRule(ABC):
    """How a push is applied."""

    takes_nonfinite = False
    """Whether a push with inf or nan is applied."""

    @abstractmethod
    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """Change `anchor` in place by `values`, shape (n,), which may be overwritten."""

    def tensors(self) -> dict[str, Tensor]:
        """State of the anchor's shape."""
        return {}

    def numbers(self) -> dict[str, float]:
        """State that is one number."""
        return {}

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:  # noqa: B027
        """Restore what `tensors` and `numbers` gave."""


class OptimizerSteps(UpdateRule):
    """Gradients: the user's optimizer steps here, after the outer step has corrected the gradient for its delay.

    It is element-wise, so that it does not matter where a tensor is cut.
    """

    def __init__(self, outer: Arrival, kind: type[Optimizer], anchor: Tensor, settings: GroupSettings) -> None:
        self._outer = outer
        self._parameter = nn.Parameter(anchor, requires_grad=False)  # the same memory
        single: dict[str, Any] = {"foreach": False} if "foreach" in inspect.signature(kind).parameters else {}
        self._optimizer = kind([self._parameter], **single)
        # What torch puts around a step, for its profiler and for hooks, takes longer than the step of a small shard.
        # Not found by torch's mark, which `functools.wraps` copies to what a user puts around the step.
        profiled: Any = Optimizer.profile_hook_step(Optimizer.step)
        step: Any = kind.step
        self._step = step.__wrapped__ if getattr(step, "__code__", None) is profiled.__code__ else step
        self._group = self._optimizer.param_groups[0]
        self._taken: GroupSettings = {}
        self._take(settings)
        self._state = {name: torch.zeros_like(anchor) for name in outer.tensors}
        self._highest_lr = 0.0

    def _take(self, settings: GroupSettings) -> None:
        if settings is self._taken:
            return
        self._taken = settings
        for name, value in settings.items():
            if name in self._group and name not in LOCAL_SETTINGS:
                self._group[name] = tuple(value) if isinstance(value, list) else value

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        self._take(incoming.settings)
        group = self._group
        lr, momentum = float(group["lr"]), float(group.get("momentum", 0.0))
        self._highest_lr = max(self._highest_lr, lr)
        push = Push(push.delay, push.update, push.workers, lr, momentum, self._highest_lr)
        self._outer.mend(values, anchor, origin, self._state, push)
        group["lr"] = push.lr * self._outer.rate(push)
        if "momentum" in group:
            group["momentum"] = self._outer.momentum(push.momentum, push)
        self._parameter.grad = values
        try:
            self._step(self._optimizer)
        finally:
            self._parameter.grad = None
            group["lr"] = push.lr
            if "momentum" in group:
                group["momentum"] = push.momentum

    def _kept(self) -> dict[str, Any]:
        return dict(self._optimizer.state.get(self._parameter, {}))

    def tensors(self) -> dict[str, Tensor]:
        shape = self._parameter.shape
        kept = {k: v for k, v in self._kept().items() if isinstance(v, Tensor) and v.shape == shape}
        return {**self._state, **{f"optimizer.{k}": v for k, v in kept.items()}}

    def numbers(self) -> dict[str, float]:
        shape = self._parameter.shape
        found = {"highest_lr": self._highest_lr}
        for name, value in self._kept().items():
            if isinstance(value, Tensor) and value.shape == shape:
                continue
            if isinstance(value, (Tensor, int, float)) and not (isinstance(value, Tensor) and value.numel() != 1):
                found[f"optimizer.{name}"] = float(value)
        return found

    def load(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        self._highest_lr = numbers.get("highest_lr", 0.0)
        for name in self._state:
            if name in tensors:
                self._state[name].copy_(tensors[name])
        state = {name: value.clone() for name, value in of_optimizer(tensors).items()}
        state |= {name: torch.tensor(number, dtype=torch.float32) for name, number in of_optimizer(numbers).items()}
        if state:
            self._optimizer.state[self._parameter] = state


def of_optimizer(state: Mapping[str, T]) -> dict[str, T]:
    """The part of a shard's state that is the optimizer's, by its own names."""
    return {name.removeprefix("optimizer."): x for name, x in state.items() if name.startswith("optimizer.")}


class AddDelta(UpdateRule):
    """Deltas: a block's delta is added, times the rate that the outer step gives it."""

    def __init__(self, outer: Arrival) -> None:
        self._outer = outer

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """theta += rate d."""
        anchor.add_(values, alpha=self._outer.rate(push))


class ElasticPull(UpdateRule):
    """Elastic averaging: the center moves towards the worker's parameters; alpha = beta / N for the N of the start."""

    def __init__(self, outer: Elastic, workers: int) -> None:
        self._elastic, self._workers = outer, workers

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """center += alpha (x - center)."""
        self._elastic.elastic_step(anchor, values, self._workers)


class TakeBuffer(UpdateRule):
    """Other buffers: those of rank 0, or of the first worker that still takes part."""

    takes_nonfinite = True

    def __init__(self, clocks: WorkerClocks) -> None:
        self._clocks = clocks

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """b = b_i of one worker i."""
        if incoming.sender == self._clocks.first:
            anchor.copy_(values)


class BlendBuffer(UpdateRule):
    """Running statistics: a moving mean over the workers, so that exported buffers stay between valid values."""

    def apply(self, values: Tensor, anchor: Tensor, origin: Tensor | None, incoming: IncomingPush, push: Push) -> None:
        """b += (b_i - b) / N; counters take the largest."""
        if anchor.is_floating_point():
            anchor.lerp_(values, 1.0 / push.workers)
        else:
            torch.maximum(anchor, values, out=anchor)


REFUSED = -1
"""In place of a delay: the push was not finite and was not applied."""
LEDGER_SHARD = 0
"""The number of the shard whose owner keeps the ledger of the data."""
NO_READER = -1
"""In place of a reader's rank: no gradient will be computed at the values of this pull."""


class ParameterShard:
    """One shard."""

    def __init__(
        self,
        number: int,  # the same on all workers
        anchor: Tensor,  # its values, host memory; kept and changed in place
        update_rule: Callable[[Tensor], UpdateRule],  # anchor -> how a push is applied to it
        clocks: WorkerClocks,
        keeps_origins: bool,  # whether to keep the values that each worker has pulled and may compute at
    ) -> None:
        self.number, self.anchor, self.clocks = number, anchor, clocks
        self.version = 0
        self.numbered = PushNumbers()
        self.lock = runtime.Lock()
        self.ledger: Ledger | None = None
        self.news: dict[int, Any] = {}  # reader -> the ledger's news that go with the values it pulled
        self.update_rule = update_rule(anchor)
        self._keeps_origins = keeps_origins
        self.origins: dict[int, dict[int, Tensor]] = {}  # worker -> version -> the values that it pulled
        self._left: set[int] = set()  # workers whose pushes come too late: what they had pushed has been counted
        self._spare: list[Tensor] = []  # memory of such values that are not needed any more
        self._first = anchor.clone() if keeps_origins else None

    def push(self, values: Tensor, incoming: IncomingPush) -> int:
        """Apply a push, shape (n,), unless the shard has it already; its delay, or `REFUSED`. Overwrites `values`.

        The samples of a refused push count as done: they would be refused again.
        """
        with self.lock:
            if incoming.sender in self._left:
                return 0
            self.version = max(self.version, incoming.version)  # a replica may be older than what a worker has pulled
            self.clocks.tick(incoming.sender, incoming.clock)
            if not self.numbered.is_new(incoming.sender, incoming.clock, incoming.marks):
                return self.version - incoming.version
            if not self.update_rule.takes_nonfinite and not all_finite(values):
                return REFUSED
            delay = self.version - incoming.version
            push = Push(delay, self.version + 1, self.clocks.sharing(incoming.clock), lr=0.0)
            origin = self._origin(incoming) if self._keeps_origins else None
            self.update_rule.apply(values, self.anchor, origin, incoming, push)
            self.version += 1
            return delay

    def _origin(self, incoming: IncomingPush) -> Tensor | None:
        """The values at which a push was computed; the first values where the worker has not pulled."""
        kept = self.origins.get(incoming.sender, {})
        for version in [version for version in kept if version < incoming.version]:
            self._spare.append(kept.pop(version))  # a worker never goes back
        return kept.get(incoming.version, self._first)

    def pull(self, reader: int, out: Tensor) -> int:
        """Copy the values to `out`, shape (n,); their version.

        With an overlap a worker may still push from older values than it pulled last, so a pull keeps those.
        """
        with self.lock:
            out.copy_(self.anchor)
            if self._keeps_origins and reader != NO_READER:
                kept = self.origins.setdefault(reader, {})
                if self.version not in kept:
                    kept[self.version] = self._spare.pop() if self._spare else torch.empty_like(self.anchor)
                kept[self.version].copy_(self.anchor)
            if self.ledger is not None and reader != NO_READER:
                with self.ledger.lock:
                    self.news[reader] = self.ledger.news(reader)
            return self.version

    def leave(self, rank: int) -> None:
        """Forget worker `rank`, which is done or lost."""
        with self.lock:
            self._left.add(rank)
            self.clocks.leave(rank)
            self.origins.pop(rank, None)

    def marks(self) -> list[Mark]:
        """The samples that are in it, of the last epochs."""
        with self.lock:
            return self.numbered.marks()

    @torch.no_grad()
    def state(self) -> dict[str, Any]:
        """The shard's part of a checkpoint; copies."""
        with self.lock:
            return {
                "about": self._about(),  # the ledger goes with the data
                "anchor": self.anchor.clone(),
                "tensors": {name: tensor.clone() for name, tensor in self.update_rule.tensors().items()},
                "origins": {
                    str(rank): {str(version): tensor.clone() for version, tensor in kept.items()}
                    for rank, kept in self.origins.items()
                },
                "first": None if self._first is None else self._first.clone(),
            }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        with self.lock:
            self._take(state["about"], state["anchor"], state["tensors"])
            self.origins = {
                int(rank): {int(version): tensor.clone() for version, tensor in kept.items()}
                for rank, kept in state["origins"].items()
            }
            if self._first is not None:
                self._first.copy_(state["first"])

    @torch.no_grad()
    def snapshot(self) -> tuple[dict[str, Any], Tensor]:
        """A replica for the successor: (numbers, the tensors end to end), without origins."""
        with self.lock:
            tensors = self.update_rule.tensors()
            row = torch.cat([self.anchor, *(t.to(self.anchor.dtype) for t in tensors.values())])
            about: dict[str, Any] = {**self._about(), "ledger": None}
            if self.ledger is not None:
                with self.ledger.lock:
                    about["ledger"] = self.ledger.state()
            return about, row

    @torch.no_grad()
    def restore(self, about: dict[str, Any], row: Tensor) -> None:
        """Restore what `snapshot` gave at another worker."""
        parts = torch.split(row, self.anchor.numel())
        with self.lock:
            self._take(about, parts[0], dict(zip(about["tensors"], parts[1:], strict=True)))

    def _about(self) -> dict[str, Any]:
        return {
            "piece": self.number,
            "version": self.version,
            "clocks": self.clocks.state(),
            "numbered": self.numbered.state(),
            "tensors": list(self.update_rule.tensors()),
            "numbers": self.update_rule.numbers(),
        }

    def _take(self, about: dict[str, Any], anchor: Tensor, tensors: dict[str, Tensor]) -> None:
        self.version = int(about["version"])
        self.numbered.load(about.get("numbered", {}))
        self.anchor.copy_(anchor)
        self.update_rule.load(tensors, about["numbers"])
        self.clocks.load(about["clocks"])
        if self.ledger is not None and about.get("ledger") is not None:
            with self.ledger.lock:
                self.ledger.catch_up(about["ledger"])
        self.origins.clear()
        if self._first is not None:
            self._first.copy_(anchor)


def all_finite(values: Tensor) -> bool:
    """Whether no element is inf or nan; its sum may overflow."""
    return math.isfinite(values.sum().item()) or bool(torch.isfinite(values).all())


@dataclass(frozen=True)
class PushResult:
    """The result of a push."""

    delay: int  # updates of the shard since the version at which the push was computed, or `REFUSED`
    may_start: bool  # whether the sender may begin its next step; else the answer has to wait


class ShardServer:
    """The shards that a worker owns."""

    def __init__(
        self,
        rank: int,
        shards: dict[int, ParameterShard],
        make: Callable[[int], ParameterShard],  # makes a shard with the values that this worker pulled last
        reads_before: bool = False,  # whether an answer holds the values from before the push (elastic averaging)
        push_bytes: int = 0,  # of a worker's push to all owners together
    ) -> None:
        self.push_bytes = push_bytes
        self.rank, self.shards, self._make, self.reads_before = rank, shards, make, reads_before
        self.gone: set[int] = set()  # workers that are done or lost
        self._replicas: dict[int, tuple[dict[str, Any], Tensor]] = {}

    def push(self, number: int, values: Tensor, incoming: IncomingPush, out: Tensor | None) -> PushResult:
        """Apply a push to shard `number`; first read the values where the rule answers with those."""
        shard = self.shards[number]
        if self.reads_before and out is not None:
            shard.pull(incoming.sender, out)
        delay = shard.push(values, incoming)
        return PushResult(delay, shard.clocks.may_start(incoming.sender))

    def read(self, number: int, reader: int, out: Tensor | None, after_push: bool) -> int:
        """Answer a push or a bare pull: write the values to `out`, where given; their version."""
        shard = self.shards[number]
        if out is None or (after_push and self.reads_before):
            return shard.version
        return shard.pull(reader, out)

    def tick(self, rank: int, clocks: Iterable[Sequence[int]]) -> None:
        """Note (shard, clock) pairs of worker `rank`, of shards whose owner was lost."""
        for number, clock in clocks:
            if number in self.shards:
                self.shards[number].clocks.tick(rank, clock)

    def idle(self, rank: int) -> None:
        for shard in list(self.shards.values()):
            with shard.lock:
                shard.clocks.idle(rank)

    def leave(self, rank: int) -> None:
        """Let no worker wait for worker `rank` any more: it is done or lost."""
        self.gone.add(rank)
        for shard in list(self.shards.values()):
            shard.leave(rank)

    # -- replicas ---------------------------------------------------------------------------------

    def begin_replica(self, number: int) -> None:
        """Make the first replica of shard `number`: all workers begin with the same values."""
        self.keep_replica(*self._make(number).snapshot())

    def keep_replica(self, about: dict[str, Any], row: Tensor) -> None:
        """Keep the newest state of another worker's shard."""
        self._replicas[int(about["piece"])] = (about, row)

    def adopt(self, number: int) -> int:
        """Become the owner of a shard whose owner was lost, with the state of its replica; its version.

        A replica states which pushes it holds; live workers send the later ones again.
        """
        shard = self._make(number)
        shard.restore(*self._replicas.pop(number))
        for rank in self.gone:
            shard.leave(rank)
        self.shards[number] = shard
        return shard.version
