# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused here: at `attach`, or at the first step that shows it."""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer, SparseAdam

from paceline.communication import Transport
from paceline.core.flat import Fragment, Modules, module_list, trainable
from paceline.core.optimizer_state import Named
from paceline.core.world import World
from paceline.errors import MismatchError, UnsupportedError
from paceline.rules.payload import Delta, FirstMoment
from paceline.rules.rule import Rule, is_block, steps_with_gradients

MARK = "_paceline_run"


def optimizer_list(optimizer: Any) -> list[Optimizer]:
    """One optimizer or several over disjoint parameters, as a list."""
    found = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
    for one in found:
        if not isinstance(one, Optimizer):
            raise UnsupportedError(
                f"optimizer must be a torch.optim.Optimizer or a list of them, got {type(one).__name__}"
            )
        if getattr(one, MARK, None) is not None:
            raise UnsupportedError("this optimizer is attached already; close that run before attaching it again")
    if not found:
        raise UnsupportedError("the list of optimizers is empty")
    return found


def inside(model: Modules, rule: Rule, group: Any) -> Modules:
    """The module inside `DistributedDataParallel`, where that works within a host and the rule between hosts."""
    if isinstance(model, DistributedDataParallel) and group is not None and is_block(rule):
        return model.module  # type: ignore[no-any-return]
    return model


def check_model(model: Modules) -> None:
    """Refuse models whose parameters are not there, or are averaged by somebody else."""
    for prefix, module in module_list(model):
        if not isinstance(module, nn.Module):
            raise UnsupportedError(f"model must be a torch.nn.Module (or several), got {type(module).__name__}")
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise UnsupportedError(
                f"the model is wrapped in {type(module).__name__}, which averages gradients itself; "
                "give paceline the module inside (model.module), or, for blocks between hosts, the group of the "
                "processes that stand at the same place of each host: attach(model, ..., group=group)"
            )
        for name, parameter in module.named_parameters():
            if is_lazy(parameter):
                raise UnsupportedError(
                    f"{prefix}{name} is a lazy parameter without a shape yet; run one batch through the model, "
                    "then attach"
                )
            if parameter.is_meta:
                raise UnsupportedError(f"{prefix}{name} lies on the meta device; give it real memory, then attach")
        for name, buffer in module.named_buffers():
            if is_lazy(buffer) or buffer.is_meta:
                raise UnsupportedError(
                    f"{prefix}{name} is a buffer without memory; run a batch through the model first"
                )


def check_loader(loader: Any, world: World) -> None:
    """Refuse what is no iterable of batches."""
    if isinstance(loader, nn.Module) or not (hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")):
        raise UnsupportedError(
            world.sign(
                "run.share takes a DataLoader, or an iterable of batches that every worker sees in the same order, "
                f"got a {type(loader).__name__}"
            )
        )


def own_parameters(model: Modules, optimizers: list[Optimizer]) -> list[tuple[Optimizer, Named]]:
    """Each optimizer with its trainable parameters by name; every parameter in exactly one of them."""
    names = {id(parameter): name for name, parameter in trainable(model)}
    taken: dict[int, int] = {}
    owned: list[tuple[Optimizer, Named]] = []
    for number, optimizer in enumerate(optimizers):
        mine: Named = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if not parameter.requires_grad:
                    continue
                if id(parameter) not in names:
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} holds a parameter of shape {tuple(parameter.shape)} that the "
                        "model does not have; pass every module that it trains: attach([encoder, decoder], optimizer)"
                    )
                if id(parameter) in taken:
                    raise UnsupportedError(
                        f"{names[id(parameter)]} stands in two optimizers (or twice in one); each parameter needs "
                        "exactly one"
                    )
                taken[id(parameter)] = number
                mine.append((names[id(parameter)], parameter))
        owned.append((optimizer, mine))
    if not taken:
        raise UnsupportedError("no parameter of the model both requires a gradient and stands in the optimizer")
    return owned


def check_rule(rule: Rule, owned: list[tuple[Optimizer, Named]]) -> None:
    """Refuse optimizers that the rule cannot serve."""
    for optimizer, _ in owned:
        name = type(optimizer).__name__
        gradients = steps_with_gradients(rule)
        if gradients and isinstance(optimizer, LBFGS):
            raise UnsupportedError(
                f"{name} computes gradients inside its step, where {rule.text()} cannot exchange them; use a rule that "
                "exchanges blocks (averaging, bmuf, diloco) without warm-up, or another optimizer"
            )
        if gradients and isinstance(optimizer, SparseAdam):
            raise UnsupportedError(
                f"{name} wants sparse gradients, which have no flat form; use a rule that exchanges blocks without "
                "warm-up, or a dense optimizer"
            )
        if isinstance(rule.payload, (Delta, FirstMoment)):
            rule.payload.resolve(optimizer)
        if getattr(rule.codec, "momentum", 0) and any(
            g.get("momentum") or g.get("betas") for g in optimizer.param_groups
        ):
            raise UnsupportedError(
                f"{rule.text()} keeps momentum itself, before it chooses what to send, and {name} keeps one too; "
                "use SGD without momentum, or momentum=0 in the rule"
            )


def check_scaler(rule: Rule, scaler: Any) -> None:
    """Refuse a scaler whose inf checks would come after the step that the rule makes."""
    if isinstance(rule.payload, FirstMoment) and scaler is not None:
        raise UnsupportedError(
            f"{rule.text()} makes Adam's step itself, where a GradScaler cannot skip it; train in bfloat16 without a "
            "scaler, or use the rule one_bit"
        )


def about_optimizers(owned: list[tuple[Optimizer, Named]]) -> dict[str, Any]:
    """What has to be the same of the workers' optimizers: their kinds, their groups, and whether they have begun."""
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
    """Compare rule, settings and the model's layout over the workers; the same error on all where they differ.

    Args:
        rows: name, shape, dtype and kind of each tensor.
    """
    everybody = transport.gather_json({"rule": rule.text(), "settings": settings, "rows": rows})
    world, first = transport.world, everybody[0]
    for rank, one in enumerate(everybody):
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


def check_unchanged(owned: list[tuple[Optimizer, Named]]) -> None:
    """Refuse parameters that came to an optimizer, or left it, after attach."""
    for optimizer, named in owned:
        known = {id(parameter) for _, parameter in named}
        now = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if now != known:
            raise UnsupportedError(
                f"{type(optimizer).__name__} had {len(known)} trainable parameters at attach and has {len(now)} now "
                f"({len(now - known)} new, {len(known - now)} gone or frozen); close the run and attach again after "
                "such a change"
            )


def refuse_hidden_scaler(rule: Rule, scaler: Any, landed: bool) -> None:
    """A GradScaler that we do not know of makes the step. Without gradients that all have exchanged in backward it
    skips steps on some workers alone, and the others would wait for ever."""
    check_scaler(rule, scaler)
    if not landed:
        raise UnsupportedError(
            "the step is taken by a GradScaler, and this rule exchanges gradients: workers have to skip a step "
            "together. Give the scaler to paceline: attach(model, optimizer, scaler=scaler, ...)"
        )


@torch.no_grad()
def broadcast_start(transport: Transport, parts: list[Fragment], source: int = 0) -> None:
    """Everybody takes the values of rank `source`."""
    for part in parts:
        part.refresh()
        flat = part.whole(transport.wire_device(part.device))
        transport.broadcast(flat, source).wait()
        part.write(0, part.numel, flat)
