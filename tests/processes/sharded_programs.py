# SPDX-License-Identifier: Apache-2.0
"""Two workers, each two processes that hold its parameters as shards: `python -m tests.processes.sharded_programs`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import paceline
from paceline import Guard, PacelineError
from tests.helpers import State, adam, attached, make_net, momentum_sgd, sgd
from tests.processes.together import run_named

RANK = int(os.environ.get("RANK", "0"))
WORKER, SHARD = divmod(RANK, 2)
STEPS = 8

RULES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "averaging(period=2)": momentum_sgd,
    "bmuf(period=2)": momentum_sgd,
    "bmuf(period=4, overlap=2, fragments=2)": sgd,
    "bmuf_adam(period=2)": adam,
    "diloco(period=2)": adam,
    "streaming_diloco(period=4, fragments=2, codec='dense')": adam,
}
BAD = {"nothing": 1.0, "an inf": float("inf"), "a far number": 1e9}
"""What one number of one shard of worker 0's gradient is multiplied by, in one step."""
CASES = [(rule, bad) for number, rule in enumerate(RULES) for bad in BAD if number % 2 or bad == "nothing"]


class Workers:
    """Both workers' groups of processes."""

    def __init__(self) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("worker", "shard"))
        self.shard, self.group = mesh["shard"], mesh["worker"].get_group()

    def model(self, sharded: bool) -> Any:
        from torch.distributed.fsdp import fully_shard

        model = make_net()
        for part in (model[0], model) if sharded else ():
            fully_shard(part, mesh=self.shard)
        return model

    def train(self, rule: str, sharded: bool, factor: float = 1.0, looks: bool = False, guard: Any = "auto") -> State:
        """Train to the end; the parameters in one piece.

        Args:
            rule: the rule.
            sharded: whether the model is.
            factor: what one number of worker 0's gradient is multiplied by, at the end of a block.
            looks: whether the global model is evaluated, exported and gone back to meanwhile.
            guard: as for attach.
        """
        model = self.model(sharded)
        with attached(model, rule, RULES[rule], group=self.group, guard=guard, timeout_s=60) as (run, _, optimizer):
            for step in range(STEPS):
                generator = torch.Generator().manual_seed(1000 * WORKER + step)
                optimizer.zero_grad()
                model(torch.randn(4, 6, generator=generator)).square().mean().backward()
                if step == STEPS - 3 and WORKER == 0:  # the end of a block: no forward pass spreads it
                    spoil(model[0].weight.grad, factor)
                optimizer.step()
                if looks and step == STEPS // 2:
                    look(run, model)
                    run.restore(run.snapshot())
        return whole(model)


def spoil(gradient: Any, factor: float) -> None:
    """Multiply the last number: of the last shard, where there are shards."""
    if not hasattr(gradient, "to_local"):
        gradient[-1, -1] *= factor
    elif SHARD == 1:
        gradient.to_local()[-1, -1] *= factor


def look(run: paceline.Run, model: nn.Module) -> None:
    """Evaluate the global model, whose last layers stay gathered after it."""
    with run.global_model(), torch.no_grad():
        model(torch.ones(1, 6))


def whole(model: Any) -> State:
    """The parameters in one piece."""
    return {name: _whole(one) for name, one in model.named_parameters()}


def _whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().clone()


def refused(action: Callable[[], object]) -> str:
    """What an action is refused with."""
    try:
        action()
    except PacelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def attach(workers: Workers, rule: str = "bmuf", ddp: bool = False, **settings: Any) -> str:
    """What attaching a sharded model, or one in DistributedDataParallel, is refused with; and then tuning it."""
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Linear(6, 4)  # shards of one size, which could be mixed up
    if ddp:
        model = nn.parallel.DistributedDataParallel(model, process_group=workers.shard.get_group())
    else:
        fully_shard(model, mesh=workers.shard)
    settings = {"group": workers.group, **settings}

    def tune() -> None:
        with attached(model, rule, timeout_s=60, **settings) as (run, *_):
            run.tune(lr=0.5)

    return refused(tune)


def refusals(workers: Workers, directory: Path) -> dict[str, str]:
    """Everything that is not served, and what it is refused with."""
    found = {
        "no group": attach(workers, group=None),
        "the group of the shards": attach(workers, group=workers.shard.get_group()),
        "checkpoint": attach(workers, checkpoint=directory / "steps"),
        "receipts": attach(workers, receipts=directory / "receipts"),
        "tune": attach(workers),
        "ddp, auto": attach(workers, "auto", ddp=True),
        "ddp, receipts": attach(workers, ddp=True, receipts=directory / "receipts"),
        "ddp, tune": attach(workers, ddp=True),
    }
    rules = ["sync", "one_bit", "bmuf(warmup=2)", "bmuf(within='host')", "auto", "auto(probe=0)", "asgd", "easgd"]
    found |= {rule: attach(workers, rule) for rule in rules}
    with attached(workers.model(True), "bmuf", group=workers.group, timeout_s=60) as (run, model, _):
        found["save"] = refused(lambda: run.save(directory / f"saved.{SHARD}"))
        found["export"] = refused(run.model_for_export)
        state = run.global_state()
        found["state"] = str({name: list(tensor.shape) for name, tensor in state.items()} == shapes())
        found["values"] = str(all(torch.equal(_whole(state[name]), one) for name, one in whole(model).items()))
    return found


def shapes() -> dict[str, list[int]]:
    """Of the whole parameters."""
    return {name: list(tensor.shape) for name, tensor in make_net().state_dict().items()}


def sharded(directory: Path) -> None:
    """Every rule with every bad number, beside workers of one process each; and what is refused."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    workers = Workers()
    apart: dict[str, float] = {}
    for rule, bad in CASES:
        guard = Guard(history=2, window=4)
        plain = workers.train(rule, False, BAD[bad], guard=guard)
        shards = workers.train(rule, True, BAD[bad], looks=bad == "nothing", guard=guard)
        apart[f"{rule}, {bad}"] = max(float((plain[name] - shards[name]).abs().max()) for name in plain)
    said = refusals(workers, directory)
    (directory / f"sharded.{RANK}.json").write_text(json.dumps({"apart": apart, "refused": said}))
    dist.destroy_process_group()


if __name__ == "__main__":
    run_named(globals(), *sys.argv[1:])
