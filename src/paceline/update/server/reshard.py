# SPDX-License-Identifier: Apache-2.0
"""Reshards a checkpoint of N owners for M.

Each new shard is put together from the old ones that it overlaps: values, the optimizer's state and the outer state
element for element. What a shard has once (its version, the optimizer's count of steps) comes from the overlapped shard
with most updates; at a checkpoint they differ only by pushes that an owner refused.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core.flat import Modules, buffer_fragments
from paceline.core.optimizer_state import Owned
from paceline.errors import CheckpointError
from paceline.rules.topology.sharded import Cut, Sharded
from paceline.update.server.optimizer_support import optimizer_state
from paceline.update.server.sharding import ShardLayout, Span

SHARDS = ("exchange", "pieces")


class OldShards:
    """The shards that a checkpoint of N workers holds.

    Args:
        old: the checkpoint.
        numels: elements of each span, in order.
        topology: how spans were cut.

    Raises:
        CheckpointError: its shards are not those of such spans.
    """

    def __init__(self, old: OldCheckpoint, numels: Sequence[int], topology: Sharded) -> None:
        self._old = old
        self._spans: list[list[tuple[int, Cut]]] = []
        first = 0
        for numel in numels:
            cuts = topology.pieces(numel, old.size)
            self._spans.append(list(enumerate(cuts, first)))
            first += len(cuts)
        self._rank_of = {int(number): rank for rank in range(old.size) for number in old.keys(rank, *SHARDS)}
        if sorted(self._rank_of) != list(range(first)):
            raise CheckpointError(
                f"the checkpoint does not fit the model: it holds {len(self._rank_of)} shards, and {old.size} workers "
                f"have {first} of this model"
            )

    def _part(self, number: int, *path: str) -> Any:
        return self._old.part(self._rank_of[number], *SHARDS, str(number), *path)

    def cut(self, span: int, begin: int, end: int, clocks: Sequence[tuple[int, int]] = ()) -> dict[str, Any]:
        """Elements begin .. end (excl.) of a span, as the state of a shard with these (rank, clock) pairs."""
        over = [(n, cut) for n, cut in self._spans[span] if cut.begin < end and begin < cut.end]
        abouts = {number: self._part(number, "about") for number, _ in over}
        newest = max(abouts.values(), key=lambda about: int(about["version"]))
        names = list(dict.fromkeys(name for about in abouts.values() for name in about["tensors"]))
        anchor = torch.cat([self._slice(n, cut, begin, end, "anchor") for n, cut in over])
        tensors = {
            name: torch.cat(
                [
                    self._slice(n, cut, begin, end, "tensors", name)
                    if name in abouts[n]["tensors"]
                    else torch.zeros(min(cut.end, end) - max(cut.begin, begin), dtype=anchor.dtype)
                    for n, cut in over
                ]
            )
            for name in names
        }
        about = {"version": newest["version"], "numbers": newest["numbers"], "tensors": names, "clocks": clocks}
        return {"about": about, "anchor": anchor, "tensors": tensors, "origins": {}, "first": anchor}

    def _slice(self, number: int, cut: Cut, begin: int, end: int, *path: str) -> Tensor:
        whole: Tensor = self._part(number, *path)
        if whole.numel() != cut.numel:
            raise CheckpointError(
                f"the checkpoint does not fit the model: shard {number} has {whole.numel()} elements there and "
                f"{cut.numel} here"
            )
        return whole[max(begin, cut.begin) - cut.begin : min(end, cut.end) - cut.begin]


def resharded(
    old: OldShards, spans: Sequence[Span], own: Container[int], clocks: Sequence[tuple[int, int]]
) -> dict[int, dict[str, Any]]:
    """Number -> state, of the shards of `spans` that are in `own`; with the (rank, clock) pairs of all workers."""
    return {
        one.number: old.cut(span.number, one.cut.begin, one.cut.end, clocks)
        for span in spans
        for one in span.ranges
        if one.number in own
    }


def from_one_worker(span: Span, optimizer: Optimizer | None, own: Container[int]) -> dict[int, dict[str, Any]]:
    """Number -> state, of a span's shards that are in `own`, after a run of one worker.

    Args:
        span: with the model's values in `pulled`.
        optimizer: whose state the owners continue, if any.
        own: numbers of shards.
    """
    tensors, numbers = optimizer_state(optimizer, span.fragment, 0, span.numel) if optimizer is not None else ({}, {})
    about = {"version": 0, "numbers": numbers, "clocks": []}
    states = {}
    for one in span.ranges:
        if one.number in own:
            low, high = one.cut.begin, one.cut.end
            values = span.pulled[low:high]
            kept = {name: tensor[low:high] for name, tensor in tensors.items()}
            states[one.number] = {"about": about, "anchor": values, "tensors": kept, "origins": {}, "first": values}
    return states


def old_clocks(old: OldCheckpoint, count: int) -> list[int]:
    """The clocks with which all workers resume, one for each client: those of rank 0."""
    return [int(old.part(0, "exchange", "streams", k, "clock") or 0) for k in range(count)]


def whole_optimizers(old: OldCheckpoint, model: Modules, owned: Owned, topology: Sharded) -> list[dict[str, Any]]:
    """State dictionaries of optimizers that stepped at the owners, for a single worker.

    Args:
        old: the checkpoint.
        model: the user's modules.
        owned: (optimizer, its named parameters) pairs.
        topology: how spans were cut.
    """
    states: list[dict[str, Any]] = old.part(0, "optimizers")
    layout = ShardLayout(topology, 1)
    spans = [layout.add_optimizer(optimizer, named) for optimizer, named in owned]
    numels = [span.numel for span in layout.spans]
    numels += [part.numel for part in buffer_fragments(model)]
    shards = OldShards(old, numels, topology)
    for (optimizer, _), own, one in zip(owned, spans, states, strict=True):
        every = [p for group in optimizer.param_groups for p in group["params"]]
        place = {id(parameter): number for number, parameter in enumerate(every)}
        one["state"] = {}
        for span in own:
            for number, state in _states(span, shards.cut(span.number, 0, span.numel), place):
                one["state"][number] = state
    return states


def _states(span: Span, shard: dict[str, Any], place: dict[int, int]) -> list[tuple[int, dict[str, Tensor]]]:
    """(number of a parameter, its optimizer state) pairs of a span; without outer state."""
    prefix = "optimizer."
    rows = {
        key.removeprefix(prefix): span.fragment.unflatten(flat)
        for key, flat in shard["tensors"].items()
        if key.startswith(prefix)
    }
    numbers = {k.removeprefix(prefix): v for k, v in shard["about"]["numbers"].items() if k.startswith(prefix)}
    states = []
    for name, parameter in zip(span.fragment.names, span.fragment.tensors, strict=True):
        state = {key: row[name] for key, row in rows.items()}
        state |= {key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()}
        if state:
            states.append((place[id(parameter)], state))
    return states
