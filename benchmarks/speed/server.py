# SPDX-License-Identifier: Apache-2.0
"""A push and a pull of 100 MB through the server inside the workers, over gloo's bare send and receive.

Two processes; the second owns 100 MB of fp32 parameters in shards. In turn, the first pushes a gradient of 100 MB,
which the owner checks and applies with the user's SGD, and pulls the new values; gloo sends 100 MB there and back; and
so does a bare loop over a socket (`_server_bare.py`). Then the same with 10 MB in 40 pieces, and in the 10 pieces of
the default, for the processor time of the worker that pushes. Then four workers make steps under `asgd`, as many each,
and the bytes that each has sent are compared. All are medians.

    python benchmarks/speed/server.py [--repeats 15] [--piece 262144] [--quick]

`--quick` sends 10 MB a few times: it shows that all of it works, and no figure that means anything.

The last line is a JSON object: `ratio` of the rates, gloo's time over the server's, and `ratio_bare`, gloo's over the
bare loop's; milliseconds of the processor for 10 MB in 40 pieces, of the worker that pushes with the server (`push_ms`)
and with the bare loop (`push_bare_ms`), their difference `push_beyond_ms`, and of the owner, who computes (`owner_ms`);
the difference for 10 pieces (`push_beyond_10_ms`); and `largest_over_mean` of the bytes that four workers send.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
import torch.distributed as dist
from _server_bare import Bare
from _server_bare import connect as connect_bare
from _workers import answer, is_worker, launch
from torch import nn

import paceline
from paceline.communication import connect
from paceline.communication.sockets.frames import memory
from paceline.data.ledger.ledger import Ledger
from paceline.rules.outer import Sum
from paceline.rules.schedule import Bounded
from paceline.rules.topology import Sharded
from paceline.update.server.ledger_client import DataAccess
from paceline.update.server.protocol import PendingExchange, ShardRequest
from paceline.update.server.shard import OptimizerSteps, ParameterShard, ShardServer, WorkerClocks
from paceline.update.server.socket_service import SocketService

ELEMENTS = 25_000_000
SMALL = 62_528
"""Elements of a piece where 10 MB are 40."""
SGD_SETTINGS = {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}


def timed(action: Callable[[], Any], times: int) -> tuple[float, float]:
    """Seconds that `action` takes, from a common start, and seconds of this process's processor until a common end."""
    dist.barrier()
    began, spent = time.perf_counter(), time.process_time()
    for _ in range(times):
        action()
    took = time.perf_counter() - began
    dist.barrier()
    return took / times, (time.process_time() - spent) / times


def service_of(rank: int, cuts: list[Any]) -> SocketService:
    """A service in which rank 1 owns everything."""

    def shard(number: int) -> ParameterShard:
        anchor = torch.zeros(cuts[number].numel)
        way = lambda a: OptimizerSteps(Sum(), torch.optim.SGD, a, SGD_SETTINGS)  # noqa: E731
        return ParameterShard(number, anchor, way, WorkerClocks(Bounded(), (0, 1)), keeps_origins=False)

    shards = {number: shard(number) for number in range(len(cuts))} if rank == 1 else {}
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    owners = dict.fromkeys(range(len(cuts)), 1)
    server = ShardServer(rank, shards, shard, push_bytes=4 * sum(cut.numel for cut in cuts))
    reports: Any = SimpleNamespace(lost=nothing, takeover=nothing, inexact=nothing)
    return SocketService(connect(60.0), server, owners, DataAccess(Ledger()), 60.0, None, reports)


def bare(rank: int, there: torch.Tensor, back: torch.Tensor) -> None:
    """100 MB to the other one, and 100 MB back."""
    if rank == 0:
        dist.send(there, 1)
        dist.recv(back, 1)
    else:
        dist.recv(there, 0)
        dist.send(back, 0)


def transfer_worker(options: argparse.Namespace) -> None:
    """One of two ranks: time all in turn."""
    numel, times = options.numel, 1 if options.quick else max(1, ELEMENTS // options.numel)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    cuts = Sharded(options.piece).pieces(numel, 1)
    service = service_of(rank, cuts)
    gradient, pulled = torch.randn(numel), torch.zeros(numel)
    there, back = torch.randn(numel), torch.randn(numel)
    numbers, versions = itertools.count(1), [0] * len(cuts)

    def push_and_pull() -> None:
        if rank:
            return
        parts = [
            ShardRequest(k, 0, gradient[cut.begin : cut.end], pulled[cut.begin : cut.end], versions[k])
            for k, cut in enumerate(cuts)
        ]
        number = next(numbers)
        pending = PendingExchange(number, dict(enumerate(parts)), clock=number, settings={0: SGD_SETTINGS})
        service.exchange(pending)
        service.wait(pending)
        versions[:] = [request.version for request in parts]

    pieces = [[memory(flat[cut.begin : cut.end]) for cut in cuts] for flat in (there, back)]
    loop = Bare(connect_bare(rank), pieces[0], pieces[1])
    ways: dict[str, Callable[[], Any]] = {
        "server": push_and_pull,
        "gloo": lambda: bare(rank, there, back),
        "bare": loop.answer if rank else loop.push,
    }
    rows: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for repeat in range(options.repeats + 2):
        for name, way in ways.items():
            found = timed(way, times)
            if repeat >= 2:  # the first touch of memory is not what is measured
                rows[name].append(found)
    service.finish()
    service.confirm_final_model()
    service.close()
    medians = {name: [statistics.median(column) for column in zip(*row, strict=True)] for name, row in rows.items()}
    both: list[Any] = [None, None]
    dist.all_gather_object(both, medians)  # among the processes of this benchmark, which trust each other
    answer({"pusher": both[0], "owner": both[1]})


def balance_worker(steps: int) -> None:
    """One of four ranks: steps of a model of 8 MB, whose gradients nobody computes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(1000, 1000), nn.BatchNorm1d(1000), nn.Linear(1000, 1000), nn.Linear(1000, 10))
    run = paceline.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3), "asgd(overlap=0)", timeout_s=60)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = run._context.owned[0][0]
    for _ in range(steps):
        optimizer.step()
    run.close()
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, run.bytes_sent)  # among the processes of this benchmark, which trust each other
    answer({"bytes": sent})


def main() -> None:
    """Run both settings and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--piece", type=int, default=Sharded().piece, help="elements of a piece, at most")
    parser.add_argument("--numel", type=int, default=ELEMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--balance", action="store_true", help=argparse.SUPPRESS)
    options = _quick.parse(parser, repeats=2, numel=ELEMENTS // 10)
    if is_worker():
        balance_worker(options.repeats) if options.balance else transfer_worker(options)
        return
    size = ["--quick"] if options.quick else []
    repeats = ["--repeats", str(options.repeats)]
    found = launch(__file__, [*repeats, "--piece", str(options.piece), *size], 2, 300)["pusher"]
    medians = {name: took for name, (took, _) in found.items()}
    processor = {}
    for pieces, piece in ((40, SMALL), (10, Sharded().piece)):
        small = launch(__file__, [*repeats, "--piece", str(piece), "--numel", str(ELEMENTS // 10), *size], 2, 300)
        for who, row in small.items():
            processor[who, pieces] = {name: 1e3 * spent for name, (_, spent) in row.items()}
    sent = launch(__file__, ["--repeats", str(options.repeats), "--balance"], 4, 300)["bytes"]
    for name, seconds in medians.items():
        mb = 4 * options.numel / 1e6
        print(f"{name:8} {1e3 * seconds:7.1f} ms for {mb:.0f} MB there and as much back, {2 * mb / seconds:6.0f} MB/s")
    print("bytes sent by each of 4 workers: " + ", ".join(f"{one:,}" for one in sent))
    for (who, pieces), row in processor.items():
        said = ", ".join(f"{name} {spent:.2f} ms" for name, spent in row.items())
        print(f"processor of the {who}, 10 MB in {pieces} pieces: {said}")
    pusher, ten = processor["pusher", 40], processor["pusher", 10]
    figures = {
        "ratio": round(medians["gloo"] / medians["server"], 3),
        "ratio_bare": round(medians["gloo"] / medians["bare"], 3),
        "push_ms": round(pusher["server"], 2),
        "push_bare_ms": round(pusher["bare"], 2),
        "push_beyond_ms": round(pusher["server"] - pusher["bare"], 2),
        "owner_ms": round(processor["owner", 40]["server"], 2),
        "push_beyond_10_ms": round(ten["server"] - ten["bare"], 2),
        "largest_over_mean": round(max(sent) / (sum(sent) / len(sent)), 4),
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
