# SPDX-License-Identifier: Apache-2.0
"""Checks of the arguments of `attach` and `run.share`: optimizers, models and loaders that cannot work are refused."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS, Optimizer, SparseAdam

from paceline.core.flat import Modules, is_sharded, module_list, reshard, trainable
from paceline.core.optimizer_state import Named, Owned
from paceline.core.world import World
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine.grad_scaler import check_scaler
from paceline.update.engine.settings import Settings

MARK = "_paceline_run"
"""Attribute of an optimizer that is attached: its run."""


def check_arguments(model: Modules, optimizer: Any, rule: Rule, settings: Settings) -> tuple[Owned, str]:
    """Refuse arguments of `attach` that cannot work together; each optimizer with its named parameters, and the name of
    a parameter of which this process holds a part, or ""."""
    optimizers = optimizer_list(optimizer)
    check_model(model)
    reshard(model)
    named = trainable(model)
    sharded = next((name for name, parameter in named if is_sharded(parameter)), "")
    owned = own_parameters(named, optimizers)
    rule.check_growth(settings.control is not None)
    rule.check_optimizers(optimizers)
    if sharded:
        check_shards(settings, sharded)
    if settings.scaler is not None:
        check_scaler(rule, settings.scaler)
    return owned, sharded


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


def without_ddp(model: Modules, rule: Rule, group: Any) -> Modules:
    """The module inside `DistributedDataParallel`, if DDP works within a host and the rule between hosts."""
    if isinstance(model, DistributedDataParallel) and group is not None and rule.schedule.exchanges_blocks:
        return model.module  # type: ignore[no-any-return]
    return model


def check_model(model: Modules) -> None:
    """Refuse models without real parameters, and models whose wrapper averages gradients itself."""
    for prefix, module in module_list(model):
        if not isinstance(module, nn.Module):
            raise UnsupportedError(f"model must be a torch.nn.Module (or several), got {type(module).__name__}")
        if isinstance(module, (DistributedDataParallel, DataParallel)):
            raise UnsupportedError(
                f"the model is wrapped in {type(module).__name__}, which averages gradients itself; "
                "give paceline the module inside (model.module), or, for blocks between hosts, the group of the "
                "processes that stand at the same place of each host: attach(model, ..., group=group)"
            )
        if any(type(part).__name__ == "FullyShardedDataParallel" for part in module.modules()):
            raise UnsupportedError(
                "the model has FullyShardedDataParallel in it, whose flat parameters paceline does not know; shard it "
                "with torch.distributed.fsdp.fully_shard"
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


def own_parameters(named: Named, optimizers: list[Optimizer]) -> Owned:
    """Each optimizer with its named trainable parameters; every parameter belongs to exactly one."""
    names = {id(parameter): name for name, parameter in named}
    taken: dict[int, int] = {}
    owned: Owned = []
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
                        f"{names[id(parameter)]} is in two optimizers, or twice in one; it needs one"
                    )
                taken[id(parameter)] = number
                mine.append((names[id(parameter)], parameter))
        owned.append((optimizer, mine))
    if not taken:
        raise UnsupportedError("no parameter of the model both requires a gradient and stands in the optimizer")
    return owned


def check_forward(rule: Rule, owned: Owned, model: Modules) -> None:
    """Refuse layers that change trained weights in the forward pass, where all workers must hold the same ones."""
    ours = {id(parameter) for _, named in owned for _, parameter in named}
    for prefix, root in module_list(model):
        for name, module in root.named_modules():
            if renormalises(module) and id(module.weight) in ours:
                raise UnsupportedError(
                    f"{prefix}{name} has max_norm={module.max_norm:g}, so that it changes its weights in the forward "
                    f"pass, by the samples of one worker; under {rule.text()} all workers must hold the same. Take a "
                    "rule of blocks, such as bmuf, or limit the norms after optimizer.step()"
                )


def renormalises(module: nn.Module) -> bool:
    """Whether a layer changes its weights in the forward pass."""
    return getattr(module, "max_norm", None) is not None and isinstance(module, (nn.Embedding, nn.EmbeddingBag))


def check_shards(settings: Settings, name: str) -> None:
    """Refuse what would hold one process's part of the parameter `name` under the name of all of it."""
    refused = {
        "leave checkpoint= out, and save run.global_state() with torch.distributed.checkpoint": settings.checkpoint,
        "workers that come and go would exchange shards of different places; leave --elastic out": settings.control,
    }
    for why, wrong in refused.items():
        if wrong is not None:
            raise UnsupportedError(f"{name} is sharded over several processes (fully_shard): {why}")


def check_together(rule: Rule, settings: Settings, sharded: str, world: World) -> None:
    """Refuse what the processes that train one worker's model together would each decide, or write, by themselves.

    Args:
        sharded: the name of a parameter of which this process holds a part, or "".
    """
    schedule = rule.schedule
    refused = {
        f"workers exchange shards of the same place, and {sharded} is one; pass the processes that hold it: attach(.., "
        "group=mesh['worker'].get_group())": bool(sharded) and settings.group is None,
        "it exchanges gradients, which fully_shard does itself over a mesh of two dimensions; name a rule of blocks "
        "without warm-up, such as bmuf(period=16)": bool(sharded) and rule.steps_with_gradients,
        "measured times choose its period, and each process of a worker measures its own; name a period, such as "
        "bmuf(period=16)": schedule.follows_times or schedule.probe is not None,
        "all processes of a worker would write one chain of receipts; leave them out": settings.receipts is not None,
    }
    for why, wrong in refused.items():
        if wrong:
            raise UnsupportedError(world.sign(f"{rule.text()}: {why}"))


def why_unprobed(rule: Rule, model: Modules, owned: Owned, settings: Settings) -> str:
    """Why gradients cannot be exchanged, the same on all workers; empty if they can.

    `step(closure)` and a GradScaler that was not passed to attach show at the first step only; there the probe ends.
    `model` is as the program gave it.
    """
    if rule.settings.ema:
        return "a moving average is taken over blocks"
    optimizer, _ = owned[0]
    if len(owned) > 1:
        return "there are several optimizers"
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        return f"{type(optimizer).__name__} computes gradients inside its step, or sparse ones"
    if optimizer.state:
        return "the optimizer has state already, which only blocks make common"
    if settings.scaler is not None:
        return "a GradScaler makes the steps"
    if rule.settings.within:
        return "the processes of a host train together"
    if settings.round is not None:
        return "it is a round of a search"
    modules = [module for _, root in module_list(model) for module in root.modules()]
    if any(getattr(module, "sparse", False) for module in modules):
        return "an embedding has sparse gradients"
    if any(renormalises(module) for module in modules):
        return "an embedding has max_norm, and changes its weights in the forward pass"
    return ""
