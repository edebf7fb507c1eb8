# SPDX-License-Identifier: Apache-2.0
"""What the processes of tests/update/server run: `python -m tests.processes.asynchronous_programs NAME DIRECTORY`."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import paceline
from paceline.communication import Transport
from paceline.communication.sockets.channel import HEADER_BYTES, FrameHeader, Late, connect
from paceline.communication.torch import transport
from paceline.rules.traffic import bytes_per_block, overhead_bytes
from paceline.update.server import rendezvous
from paceline.update.server.durability import Durability, Replicas
from paceline.update.server.socket_service import SocketService
from tests.helpers import FEATURES, adam, attached, make_data, momentum_sgd, sgd, state_of
from tests.processes.together import all_here, run_named
from tests.waiting import until

RANK = int(os.environ.get("RANK", "0"))
WORKERS = int(os.environ.get("WORLD_SIZE", "1"))
OPTIMIZERS = {"sgd": sgd, "adam": adam, "momentum": momentum_sgd}

RULES: list[tuple[str, str]] = [
    ("asgd", "sgd"),
    ("asgd(period=4)", "sgd"),
    ("ssp(staleness=2)", "momentum"),
    ("dc_asgd(kind='normalized', strength=0.1, start=20)", "sgd"),
    ("easgd(period=4)", "sgd"),
    ("adadelay", "sgd"),
    ("staleness_aware", "adam"),
]
"""Recipes, and the optimizer that each has."""
BIG = 96
"""Width of a layer: so that every worker owns a slice."""


def make_big(seed: int = 0) -> nn.Sequential:
    """A perceptron of some shards, with buffers."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, BIG), nn.BatchNorm1d(BIG), nn.Tanh(), nn.Linear(BIG, 3))


def batches(steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This worker's minibatches, for ever the same samples in another order."""
    x, y = make_data(96).tensors
    g = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (8,), generator=g)
        yield x[rows], y[rows]


def loss_of(model: nn.Module) -> float:
    """On all samples."""
    x, y = make_data(96).tensors
    model.eval()
    with torch.no_grad():
        return float(nn.functional.cross_entropy(model(x), y))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def keep(model: nn.Module, directory: Path, name: str, **numbers: float) -> None:
    """The model, with its loss and other numbers."""
    extra = {f"number.{k}": torch.tensor(v, dtype=torch.float64) for k, v in numbers.items()}
    save_file({**state_of(model), **extra}, directory / f"{name}.{RANK}.safetensors")


class Saying:
    """What the parts of `varied` have found, for the test to look at."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.found = directory, dict[str, Any]()

    def write(self) -> None:
        (self.directory / f"said.{RANK}").write_text(json.dumps(self.found))


def wide() -> nn.Sequential:
    """A model without buffers, of 49 k parameters: every owner has one shard of much the same size."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 220), nn.Tanh(), nn.Linear(220, 210), nn.Tanh(), nn.Linear(210, 3))


def train(rule: str, steps: int, model: nn.Module | None = None, **settings: Any) -> tuple[paceline.Run, nn.Module]:
    """A whole run."""
    model = make_big() if model is None else model
    with attached(model, rule, **{"timeout_s": 60, **settings}) as (run, _, optimizer):
        for x, y in batches(steps):
            step(model, optimizer, x, y)
    return run, model


def one_after_another(directory: Path, say: Saying) -> None:
    """A group of the user's, among only some of the processes, and then all."""
    members = [1, 3]
    group = dist.new_group(members)
    if RANK in members:
        run, model = train("asgd", 20, group=group)
        say.found["group"] = run.world.size
        keep(model, directory, "group")
    _, model = train("asgd", 20)
    keep(model, directory, "all")


def other_hosts(directory: Path, say: Saying) -> None:
    """Names of two hosts."""
    before, transport.host_name = transport.host_name, lambda: f"host{RANK // 2}"
    try:
        run, model = train("ssp(staleness=1)", 10)
        say.found["hosts"] = run.world.hosts
        keep(model, directory, "hosts")
    finally:
        transport.host_name = before


def traffic(directory: Path, say: Saying) -> None:
    """What is counted, what the channels have sent, and what the formula says."""
    steps, counted = 9, []
    counts, count, inside = Transport.sent, Transport.count, threading.local()

    def beside(self: Transport, nbytes: int) -> None:
        """What the service sends on connections of its own; not the start, which the connection broadcasts."""
        if not getattr(inside, "operation", False):
            counted.append(nbytes)
        counts(self, nbytes)

    def operation(self: Transport, *arguments: Any, **named: Any) -> None:
        inside.operation = True
        count(self, *arguments, **named)
        inside.operation = False

    Transport.sent, Transport.count = beside, operation  # type: ignore[method-assign]
    pushed, secure = Replicas.pushed, Durability.secure
    try:
        for name in ("replicas", "exact"):
            if name == "exact":
                Replicas.pushed, Durability.secure = lambda self, shard: None, lambda self: None
            counted.clear()
            run, _ = train("ssp(staleness=1)", steps, wide())
            service = run._engine._service
            peers = service.peers
            channels = [peer.channel for peer in peers.remote.values()]
            sent = [channel.bytes_sent for channel in (*channels, *peers.incoming.values())]
            say.found[name] = {"channels": sum(sent), "counted": sum(counted), "all": run.bytes_sent}
    finally:
        Transport.sent, Transport.count = counts, count  # type: ignore[method-assign]
        Replicas.pushed, Durability.secure = pushed, secure
    numel = sum(p.numel() for p in wide().parameters())
    shards = run.rule.topology.pieces(numel, WORKERS)
    own = [cut.numel for cut in shards if cut.owner == RANK]
    others, head = WORKERS - 1, HEADER_BYTES
    pushes = bytes_per_block(run.rule, WORKERS, numel, rank=RANK) + overhead_bytes(run.rule, WORKERS, numel, rank=RANK)
    pulls = head * (len(shards) - len(own)) + others * (head * len(own) + 4 * sum(own))
    settings = len(json.dumps(service_settings(run), separators=(",", ":")))
    words = others * (head + 34 + head + settings + 3 * head)  # hello, settings, rest, finish, bye
    say.found["formula"] = steps * pushes + pulls + words


def service_settings(run: paceline.Run) -> dict[str, Any]:
    return run._engine._shards.layout.spans[0].settings()


def not_finite(directory: Path, say: Saying) -> None:
    """One worker's gradient is nan once, another's parameters under a rule with blocks."""
    for number, rule in enumerate(("asgd", "asgd(period=2)")):
        with attached(make_big(), rule, timeout_s=60, log=directory / f"nan.{number}") as (_, model, optimizer):
            for k, (x, y) in enumerate(batches(16)):
                step(model, optimizer, x * float("nan") if RANK == 1 and k == 7 else x, y)
        parts = {k: v for k, v in state_of(model).items() if "running" not in k}
        save_file(parts, directory / f"nan.{number}.{RANK}.safetensors")


def checkpoints(directory: Path, say: Saying) -> None:
    """Saved in the middle; a second run ends at once from there, a third goes on."""
    path = directory / "checkpoint"
    for number in range(3):
        with attached(make_big(seed=number), "asgd", adam, timeout_s=60) as (run, model, optimizer):
            if number:
                run.resume(path)
                say.found["resumed"] = [run.minibatches, run.blocks]
            for k, (x, y) in enumerate(batches(0 if number == 1 else 20)):
                step(model, optimizer, x, y)
                if number == 0 and k == 9:
                    run.save(path)
        keep(model, directory, f"checkpoint.{number}")


def certificates(directory: Path, say: Saying) -> None:
    """All have certificates; then one has none; then one has those of another job."""
    run, model = train("asgd", 10, tls=directory / "tls" / str(RANK))
    keep(model, directory, "tls")
    say.found["tls"] = type(run._engine._service.peers.incoming[(RANK + 1) % WORKERS]._sock).__name__
    foreign = directory / "foreign"
    for name, tls in (("none", None), ("foreign", foreign)):
        try:
            train("asgd", 10, tls=tls if RANK == 2 else directory / "tls" / str(RANK))
        except paceline.PacelineError as error:
            say.found[name] = f"{type(error).__name__}: {error}"


def strangers(directory: Path, say: Saying) -> None:
    """While rank 0 waits for the others, all sorts of people come first."""
    guests: list[socket.socket] = []

    listen = rendezvous.listen

    def visited(*args: Any) -> Any:
        listener = listen(*args)
        for word in (b"", b"GET / HTTP/1.0\r\n\r\n", frame("a guess"), frame("\u00e9\ud800"), frame("x", 1 << 30)):
            guest = socket.create_connection((listener.address, listener.port))
            guest.sendall(word)
            guests.append(guest)
        return listener

    if RANK == 0:
        rendezvous.listen = visited
    try:
        began = time.monotonic()
        _, model = train("asgd", 10)
        say.found["strangers"] = time.monotonic() - began
        keep(model, directory, "strangers")
    finally:
        rendezvous.listen = listen
        for guest in guests:
            guest.close()


def frame(note: str, body_bytes: int = 0) -> bytes:
    """The hello of somebody who says to be rank 1."""
    text = json.dumps(note).encode()
    dtype = torch.float32 if body_bytes else None
    return FrameHeader(rendezvous.HELLO, (1, *[0] * 7), len(text), body_bytes, dtype).pack() + text


def unreachable(directory: Path, say: Saying) -> None:
    """One worker cannot connect to another: none begins without it."""

    def never(*args: Any) -> Any:
        raise Late("the way there is blocked")

    if RANK == 2:
        rendezvous.connect = never
    try:
        train("asgd", 10, timeout_s=4)
    except paceline.PeerLostError as error:
        say.found["unreachable"] = str(error)
    finally:
        rendezvous.connect = connect


def table(directory: Path, say: Saying) -> None:
    """Every rule, one attach after another in one program; rank 0 has less data, the last one more."""
    for number, (rule, kind) in enumerate(RULES):
        model = make_big()
        before = loss_of(model)
        model.train()
        optimizer = OPTIMIZERS[kind](model.parameters())
        with paceline.attach(model, optimizer, rule, timeout_s=60, log=directory / f"log.{number}") as run:
            for x, y in batches(40 + 10 * RANK):
                step(model, optimizer, x, y)
        keep(model, directory, str(number), before=before, after=loss_of(model), bytes=run.bytes_sent)


def lockstep(directory: Path, say: Saying) -> None:
    """ssp(staleness=0) and sync in rank order."""
    for name, rule in (("ssp", "ssp(staleness=0)"), ("sync", "sync(reproducible=True)")):
        with attached(make_big(), rule, momentum_sgd, timeout_s=30) as (_, model, optimizer):
            for x, y in batches(12):
                step(model, optimizer, x, y)
        keep(model, directory, name)


def varied(directory: Path) -> None:
    """What four processes are needed for, in one launch."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    say = Saying(directory)
    for part in (
        table,
        lockstep,
        one_after_another, other_hosts, traffic, not_finite, checkpoints, certificates, strangers, unreachable,
    ):  # fmt: skip
        part(directory, say)
        dist.barrier()
        say.write()
    dist.destroy_process_group()


def hosts(directory: Path) -> None:
    """A run between hosts; where this worker listens."""
    found: list[str] = []

    listen = rendezvous.listen

    def noted(address: str, *args: Any) -> Any:
        found.append(address)
        return listen(address, *args)

    rendezvous.listen = noted
    _, model = train("asgd", 20)
    keep(model, directory, "hosts")
    (directory / f"listened.{RANK}").write_text(" ".join(found))


def at_the_end(directory: Path) -> None:
    """Rank 0 dies when rank 2 has the final model and rank 1, who takes its slices over, has not."""
    service = SocketService
    finish, confirm = service.finish, service.confirm_final_model

    def dies(self: SocketService) -> bool:
        until(lambda: reached(directory / "pulled.2"))
        os.kill(os.getpid(), signal.SIGKILL)
        return True

    def comes_late(self: SocketService) -> None:
        finish(self)
        until(lambda: 0 in self.context.membership.lost)

    def has_pulled(self: SocketService) -> bool:
        (directory / "pulled.2").touch()
        return confirm(self)

    if RANK == 0:
        service.confirm_final_model = dies
    elif RANK == 1:
        service.finish = comes_late
    else:
        service.confirm_final_model = has_pulled
    _, model = train("asgd", (30, 5, 60)[RANK], log=directory / "log")
    keep(model, directory, "model", after=loss_of(model))


def reached(path: Path) -> bool:
    """Whether the test has said that it may go on."""
    return path.exists()


def faulty(directory: Path, rule: str, kind: str, timeout_s: str, least: str = "60") -> None:
    """Train until the test says `enough`; say in a file when it is under way."""
    all_here(directory)
    model = make_big()
    optimizer = OPTIMIZERS[kind](model.parameters())
    before = loss_of(model)
    model.train()
    error = ""
    steps, more = 0, 10  # so many once it is enough: who left before that has made fewer
    try:
        with paceline.attach(model, optimizer, rule, timeout_s=float(timeout_s), log=directory / "log") as run:
            for x, y in batches(10**9):
                step(model, optimizer, x, y)
                steps += 1
                if steps == int(least):
                    (directory / f"going.{RANK}").touch()
                more -= reached(directory / "enough")
                if not more or reached(directory / f"leave.{RANK}"):
                    break
                if reached(directory / "save") and not reached(directory / f"saved.{RANK}"):
                    said = ""
                    try:
                        run.save(directory / "checkpoint")
                    except paceline.PacelineError as problem:
                        said = f"{type(problem).__name__}: {problem}"
                    run.merge()  # which the living can
                    save_file(run.global_state(), directory / f"merged.{RANK}.safetensors")
                    (directory / f"new.{RANK}").write_text(said)
                    (directory / f"new.{RANK}").rename(directory / f"saved.{RANK}")
                if reached(directory / f"raise.{RANK}"):
                    raise KeyError("the user's own")
                while reached(directory / f"stand.{RANK}"):  # the program stands still, its threads go on
                    time.sleep(0.02)
        keep(model, directory, "model", before=before, after=loss_of(model), steps=steps, bytes=run.bytes_sent)
    except paceline.PacelineError as problem:
        error = f"{type(problem).__name__}: {problem}"
        raise
    finally:
        (directory / f"ended.{RANK}").write_text(error)


if __name__ == "__main__":
    run_named(globals(), *sys.argv[1:])
