# SPDX-License-Identifier: Apache-2.0
"""A shard of the parameters at its owner: values, the optimizer over them, and the number of updates.

Shards are independent of one another. A push is applied under the shard's lock, so that a pull sees all of an update or
nothing of it; between shards there is no such order, as in any sharded parameter server.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.core import runtime
from paceline.data.ledger.epoch_ledger import Mark
from paceline.data.ledger.ledger import Ledger
from paceline.rules.outer.arrival import Push
from paceline.update.server.push_numbers import PushNumbers
from paceline.update.server.shard_updates import IncomingPush, UpdateRule
from paceline.update.server.staleness import WorkerClocks

REFUSED = -1
"""In place of a delay: the push was not finite and was not applied."""
LEDGER_SHARD = 0
"""The number of the shard whose owner keeps the ledger of the data."""
NO_READER = -1
"""In place of a reader's rank: no gradient will be computed at the values of this pull."""


class ParameterShard:
    """One shard.

    Args:
        number: the same on all workers.
        anchor: its values, host memory; kept and changed in place.
        update_rule: anchor -> how a push is applied to it.
        clocks: the clock of each worker, as this shard has seen it.
        keeps_origins: whether to keep the values that each worker has pulled and may compute at.
    """

    def __init__(
        self,
        number: int,
        anchor: Tensor,
        update_rule: Callable[[Tensor], UpdateRule],
        clocks: WorkerClocks,
        keeps_origins: bool,
    ) -> None:
        self.number, self.anchor, self.clocks = number, anchor, clocks
        self.version = 0
        self.numbered = PushNumbers()
        self.lock = runtime.Lock()
        self.ledger: Ledger | None = None
        self.news: dict[int, Any] = {}  # reader -> the ledger's news that go with the values it pulled
        self._update_rule = update_rule(anchor)
        self._keeps_origins = keeps_origins
        self.origins: dict[int, dict[int, Tensor]] = {}  # worker -> version -> the values that it pulled
        self._left: set[int] = set()  # workers whose pushes come too late: what they had pushed has been counted
        self._spare: list[Tensor] = []  # memory of such values that are not needed any more
        self._first = anchor.clone() if keeps_origins else None

    def begin_with(self, tensors: dict[str, Tensor], numbers: dict[str, float]) -> None:
        """Load the state that the optimizer had at attach."""
        self._update_rule.load(tensors, numbers)

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
            if not self._update_rule.takes_nonfinite and not all_finite(values):
                return REFUSED
            delay = self.version - incoming.version
            push = Push(
                delay=delay,
                update=self.version + 1,
                workers=self.clocks.sharing(incoming.clock),
                lr=0.0,
                momentum=0.0,
            )
            origin = self._origin(incoming) if self._keeps_origins else None
            self._update_rule.apply(values, self.anchor, origin, incoming, push)
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
                "tensors": {name: tensor.clone() for name, tensor in self._update_rule.tensors().items()},
                "origins": {
                    str(rank): {str(version): tensor.clone() for version, tensor in kept.items()}
                    for rank, kept in self.origins.items()
                },
                "first": None if self._first is None else self._first.clone(),
            }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Restore what `state` gave."""
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
            tensors = self._update_rule.tensors()
            row = torch.cat([self.anchor, *(t.to(self.anchor.dtype) for t in tensors.values())])
            return {**self._about(), "ledger": self._ledger_state()}, row

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
            "tensors": list(self._update_rule.tensors()),
            "numbers": self._update_rule.numbers(),
        }

    def _ledger_state(self) -> dict[str, Any] | None:
        if self.ledger is None:
            return None
        with self.ledger.lock:
            return self.ledger.state()

    def _take(self, about: dict[str, Any], anchor: Tensor, tensors: dict[str, Tensor]) -> None:
        self.version = int(about["version"])
        self.numbered.load(about.get("numbered", {}))
        self.anchor.copy_(anchor)
        self._update_rule.load(tensors, about["numbers"])
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
