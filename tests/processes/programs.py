# SPDX-License-Identifier: Apache-2.0
"""What the processes of these tests run: `python -m tests.processes.programs NAME DIRECTORY [arguments]`."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import paceline
from paceline.core import runtime
from paceline.update.engine.blocks import outer_state
from paceline.update.exchange.exchanger import InFlightExchange
from tests.helpers import Place, Program, adam, attached, descend, follow, make_net, momentum_sgd, sgd, state_of
from tests.processes.together import all_here, run_named

RANK = int(os.environ.get("RANK", "0"))

TABLE: list[tuple[str, dict[str, Any]]] = [
    ("sync", {"optimizer": momentum_sgd}),
    ("sync(reproducible=True)", {"optimizer": momentum_sgd}),
    ("averaging(period=3)", {"optimizer": momentum_sgd}),
    ("averaging(period=3, warmup=4)", {"optimizer": momentum_sgd}),
    ("bmuf(period=3)", {"optimizer": sgd}),
    ("bmuf(period=3, reproducible=True)", {"optimizer": momentum_sgd}),
    ("bmuf(period=3, nesterov=False, ramp=2)", {"optimizer": momentum_sgd}),
    ("bmuf_adam(period=3)", {"optimizer": adam}),
    ("bmuf_adam(period=3, warmup=4, reproducible=True)", {"optimizer": adam}),
    ("diloco(period=3, reproducible=True)", {"optimizer": adam}),
    ("sync(codec='int8', reproducible=True)", {"optimizer": momentum_sgd}),
    ("one_bit(warmup=2, reproducible=True)", {"optimizer": momentum_sgd}),
    ("power(rank=1, warmup=2, reproducible=True)", {"optimizer": momentum_sgd}),
    ("top_k(ratio=0.2, warmup=0, reproducible=True)", {"optimizer": momentum_sgd}),
    ("one_bit_adam(warmup=3, reproducible=True)", {"optimizer": adam}),
    ("bmuf(period=4, overlap=3, fragments=2, reproducible=True)", {"optimizer": momentum_sgd}),
    ("streaming_diloco(period=3, fragments=2, reproducible=True)", {"optimizer": adam}),
    ("averaging(period=3, overlap=2, codec='one_bit', reproducible=True)", {"optimizer": sgd}),
    ("sync(dimensions=(2, 2), reproducible=True)", {"optimizer": momentum_sgd}),
    ("one_bit(warmup=1, dimensions=(2, 2), reproducible=True)", {"optimizer": momentum_sgd}),
]
"""Recipes that are run one after another by one launch, and by virtual workers."""
RESUMED = (8, 11, 14, 15)
"""Those that are also stopped and resumed."""

COMMON: dict[str, Any] = {"samples": 60, "norm": True, "dropout": 0.2, "schedule": True}


def program_of(number: int, **more: Any) -> Program:
    """Row `number` of the table as a program, alike in processes and virtual workers."""
    rule, choices = TABLE[number]
    return Program(rule, **{**COMMON, **choices, **more})


SMALL = 16
"""Even these models are exchanged in several chunks, so that threads have something to do at the same time."""


def numbers_for(workers: int) -> list[int]:
    """One row of each kind with four workers, those that are also resumed with two."""
    return [0, 4, 5, 8, 11, 12, 13, 14, 15, 16, 18, 19] if workers == 4 else [*RESUMED]


def table(directory: Path) -> None:
    """Every row: the final and the exported model of this rank."""
    for number in numbers_for(int(os.environ["WORLD_SIZE"])):
        torch.manual_seed(5)
        out = program_of(number)()
        parts = {f"model.{k}": v for k, v in out.model.items()} | {f"export.{k}": v for k, v in out.exported.items()}
        parts["bytes"] = torch.tensor(out.bytes_sent)
        save_file(parts, directory / f"{number}.{RANK}.safetensors")


def resume(directory: Path) -> None:
    """A whole run, then one that stops in the middle of a block and an epoch, then its continuation."""
    for number in RESUMED:
        path, at = directory / f"checkpoint.{number}", 7
        for name, more in (
            ("whole", {}),
            ("first", {"save_at": at, "save_to": path, "stop_at": at}),
            ("second", {"resume": path}),
        ):
            torch.manual_seed(5)
            out = program_of(number, epochs=3, **more)()
            if out.model:
                save_file(out.model, directory / f"{name}.{number}.{RANK}.safetensors")


def ours(directory: Path) -> None:
    """The group is made by paceline from what the launcher said; two runs one after another."""
    for _ in range(2):
        out = program_of(5)()
    save_file(out.model, directory / f"ours.{RANK}.safetensors")


def users_group(directory: Path) -> None:
    """A group of the user's with only some of the processes."""
    members = [1, 3]
    group = dist.new_group(members)
    if RANK in members:
        out = program_of(5, settings={"group": group})()
        save_file(out.model, directory / f"group.{RANK}.safetensors")
    dist.barrier()
    x = torch.ones(1)
    dist.all_reduce(x)
    assert float(x) == 4.0, "the user's own group still works"


def inner_ddp(directory: Path) -> None:
    """DistributedDataParallel within two hosts of two processes, blocks between them."""
    pairs = [[0, 1], [2, 3], [0, 2], [1, 3]]
    groups = [dist.new_group(members) for members in pairs]
    torch.manual_seed(0)
    model = make_net()
    wrapped = nn.parallel.DistributedDataParallel(model, process_group=groups[RANK // 2])
    optimizer = momentum_sgd(wrapped.parameters())
    with paceline.attach(wrapped, optimizer, "bmuf", period=4, group=groups[2 + RANK % 2], timeout_s=60):
        train_alone(wrapped, optimizer, 10)
    save_file(state_of(model), directory / f"inner_ddp.{RANK}.safetensors")


def unclosed(directory: Path) -> None:
    """The program ends without close(); whatever was hooked at the end of the program writes the model after it."""
    model = make_net()
    atexit.register(lambda: save_file(state_of(model), directory / f"unclosed.{RANK}.safetensors"))

    def main() -> None:
        optimizer = sgd(model.parameters())
        paceline.attach(model, optimizer, "averaging", period=4)
        train_alone(model, optimizer, 6)

    main()


def uneven(directory: Path) -> None:
    """Workers with different numbers of minibatches, by hand."""
    for name, rule in (("bmuf", "bmuf(period=3)"), ("sync", "sync"), ("warm", "averaging(period=2, warmup=5)")):
        with attached(make_net(norm=True), rule, timeout_s=60) as (_, model, optimizer):
            train_alone(model, optimizer, (3, 9, 0, 5)[RANK])
        save_file(state_of(model), directory / f"{name}.{RANK}.safetensors")


def with_rejected() -> dict[str, torch.Tensor]:
    """Rank 1 brings a block with nan and rank 3 one that is far too long; rank 2 has no work."""
    with attached(make_net(), "bmuf(period=2, reproducible=True)", timeout_s=60) as (run, model, optimizer):
        rank = run.world.rank
        generator = torch.Generator().manual_seed(rank)
        for step in range(0 if rank == 2 else 8):
            factor = {(1, 3): float("nan"), (3, 5): 1e9}.get((rank, step), 1.0)
            follow(optimizer, model(torch.randn(4, 6, generator=generator)).square().mean() * factor)
    return state_of(model)


def rejected(directory: Path) -> None:
    """Contributions that are rejected when their first chunks have been sent already; counts what is repeated."""
    repeated, repeat = [], InFlightExchange._repeat
    InFlightExchange._repeat = lambda self, summary: (repeated.append(summary.left_out), repeat(self, summary))[-1]  # type: ignore[method-assign]
    save_file(with_rejected(), directory / f"rejected.{RANK}.safetensors")
    InFlightExchange._repeat = repeat  # type: ignore[method-assign]
    (directory / f"rejected.{RANK}").write_text(str(repeated))


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    torch.manual_seed(RANK)
    for _ in range(steps):
        descend(model, optimizer, torch.randn(4, 6))


def four(directory: Path) -> None:
    """What needs four processes, in one launch, over a group that the user made."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for part in (table, users_group, uneven, nan, rejected, mismatch, inner_ddp):
        part(directory)
    dist.destroy_process_group()


def two(directory: Path) -> None:
    """What two are enough for, in one launch, over a group that paceline makes."""
    for part in (table, resume, ours, unclosed):
        part(directory)


def endless(directory: Path, rule: str, timeout_s: str) -> None:
    """Train until something happens; says in a file when it is under way, and what it raised after how long."""
    model = make_net()
    optimizer = sgd(model.parameters())
    last = time.monotonic()
    all_here(directory)
    try:
        run = paceline.attach(model, optimizer, rule, timeout_s=float(timeout_s))
        for step in range(10**9):
            optimizer.zero_grad()
            model(torch.randn(4, 6)).square().mean().backward()
            last = time.monotonic()
            optimizer.step()
            if step == 30:
                (directory / f"going.{RANK}").touch()
        run.close()
    except paceline.PeerLostError as error:
        (directory / f"error.{RANK}").write_text(f"{time.monotonic() - last}\n{error}")
        raise


def raises(directory: Path) -> None:
    """One worker has an error of its own, with an open run and no `with`."""
    model = make_net()
    optimizer = sgd(model.parameters())
    paceline.attach(model, optimizer, "bmuf", period=2, timeout_s=60)
    train_alone(model, optimizer, 5)
    if RANK == 2:
        raise KeyError("the user's own")
    train_alone(model, optimizer, 40)


def ends(directory: Path, rule: str, kept: str, end: str) -> None:
    """Train a little and end in one of the ways; says which threads run when the interpreter ends, after all hooks."""

    def slow(phase: str, about: dict[str, int]) -> None:
        """A full collection takes long, as with a large heap."""
        if phase == "start" and about["generation"] == 2 and threading.current_thread() is not threading.main_thread():
            time.sleep(2.5)

    def last() -> None:
        (directory / f"threads.{RANK}").write_text(" ".join(one.name for one in threading.enumerate()))

    atexit.unregister(runtime._await_threads)
    for hook in (last, runtime._await_threads):  # the last one that is registered comes first
        atexit.register(hook)
    gc.callbacks.append(slow)
    model = make_net()
    optimizer = momentum_sgd(model.parameters())
    more: dict[str, Any] = {"checkpoint": directory / "steps", "every_blocks": 1} if kept else {}
    run = paceline.attach(model, optimizer, rule, timeout_s=60, **more)
    loader = run.share(torch.utils.data.DataLoader(torch.randn(96, 6), 4))
    at = 0 if rule == "asgd" and end == "one error" else 7  # a slow worker gets few batches
    for step, x in enumerate(loader):
        descend(model, optimizer, x)
        if step == at and (end == "error" or (end == "one error" and RANK == 1)):
            raise KeyError("the user's own")
        if step == 7 and end == "exit":
            sys.exit(3)
    if end == "close":
        run.close()


def nan(directory: Path) -> None:
    """One worker's gradient is not finite once; later all are not."""

    def one(place: Place) -> float:
        return float("nan") if place.rank == 1 and place.run.minibatches == 4 else 1.0

    def everybody(place: Place) -> float:
        return float("nan") if place.run.minibatches == 4 else 1.0

    for name, number in (("sync", 0), ("bmuf", 4)):
        save_file(program_of(number, factor=one)().model, directory / f"nan.{name}.{RANK}.safetensors")
        try:
            program_of(number, factor=everybody)()
        except paceline.NonFiniteError as error:
            (directory / f"nan.{name}.{RANK}.error").write_text(str(error))


def mismatch(directory: Path) -> None:
    """Models of different shapes, then rules that differ: the same error on all."""
    words = []
    for shape, period in ((3 + RANK // 2, 4), (3, 4 + RANK // 2)):
        model = nn.Linear(2, shape)
        try:
            paceline.attach(model, sgd(model.parameters()), "bmuf", period=period, timeout_s=60)
        except paceline.MismatchError as error:
            words.append(str(error))
    (directory / f"mismatch.{RANK}").write_text("\n".join(words))


if __name__ == "__main__":
    outer_state.SMALL_ELEMENTS = outer_state.SMALL_CODED = SMALL
    run_named(globals(), *sys.argv[1:])
