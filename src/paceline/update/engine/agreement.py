# SPDX-License-Identifier: Apache-2.0
"""Checks before the first exchange that all workers attached the same model, rule and settings."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from paceline.communication import Transport
from paceline.communication.base import same_json
from paceline.core.flat import Fragment
from paceline.core.optimizer_state import Named
from paceline.errors import MismatchError, UnsupportedError
from paceline.rules.rule import Rule


def about_optimizers(owned: list[tuple[Optimizer, Named]]) -> dict[str, Any]:
    """The properties that all workers' optimizers must share: classes, groups, and whether they have state."""
    names = {id(parameter): name for _, named in owned for name, parameter in named}
    groups = [
        [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
        for optimizer, _ in owned
    ]
    return {
        "optimizer": [type(optimizer).__name__ for optimizer, _ in owned],
        "optimizer state at attach": [len(optimizer.state) > 0 for optimizer, _ in owned],
        "parameters of the groups": [[zlib.crc32(" ".join(group).encode()) for group in one] for one in groups],
    }


def check_same(transport: Transport, rule: Rule, rows: list[list[object]], settings: dict[str, Any]) -> None:
    """Compare rule, settings and the model's layout over the workers; raises the same error on all if they differ.

    Args:
        rows: name, shape, dtype and kind of each tensor.
    """
    mine = {"rule": rule.text(), "settings": settings, "rows": rows}
    if same_json(transport, mine):
        return
    gathered = transport.gather_json(mine)
    world, first = transport.world, gathered[0]
    for rank, one in enumerate(gathered):
        if one["rule"] != first["rule"]:
            raise MismatchError(
                world.sign(f"{world.name(0)} runs the rule {first['rule']} and {world.name(rank)} {one['rule']}")
            )
        if one["rows"] != first["rows"]:
            raise MismatchError(world.sign(_first_difference(world.name(0), first, world.name(rank), one)))
        for key, value in first["settings"].items():
            if one["settings"].get(key) != value:
                raise MismatchError(
                    world.sign(
                        f"{world.name(0)} has {key}={value!r} and {world.name(rank)} {one['settings'].get(key)!r}; "
                        "give all workers the same"
                    )
                )


def _first_difference(who: str, first: dict[str, Any], other: str, one: dict[str, Any]) -> str:
    for mine, theirs in zip(first["rows"], one["rows"], strict=False):
        if mine != theirs:
            return (
                f"the workers' models differ: {who} has {mine[0]} of shape {tuple(mine[1])} and dtype {mine[2]}, "
                f"{other} has {theirs[0]} of shape {tuple(theirs[1])} and dtype {theirs[2]}; "
                "build the same model everywhere"
            )
    return (
        f"the workers' models differ: {who} has {len(first['rows'])} tensors, {other} {len(one['rows'])}; "
        "build the same model everywhere"
    )


def check_unchanged(owned: list[tuple[Optimizer, Named]], optimizer: Optimizer) -> None:
    """Refuse parameters that were added to the optimizer that steps, or removed from it, after attach.

    Those of others may be frozen meanwhile: a generator steps while its critic is.
    """
    known = {id(parameter) for _, parameter in next(named for one, named in owned if one is optimizer)}
    now = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    if now != known:
        raise UnsupportedError(
            f"{type(optimizer).__name__} had {len(known)} trainable parameters at attach and has {len(now)} now "
            f"({len(now - known)} new, {len(known - now)} gone or frozen); after such a change close the run "
            "and attach again; a program that does not attach itself has to make a new optimizer then"
        )


@torch.no_grad()
def broadcast_start(transport: Transport, parts: Sequence[Fragment], source: int = 0) -> None:
    """All workers take the values of rank `source`."""
    for part in parts:
        part.refresh()
        flat = part.whole(transport.wire_device(part.device))
        transport.broadcast(flat, source).wait()
        part.write(0, part.numel, flat)
