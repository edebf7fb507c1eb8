# SPDX-License-Identifier: Apache-2.0
"""What the processes of test_routes.py run: `python -m tests.processes.route_programs NAME DIRECTORY [arguments]`."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from paceline.communication import Transport, connect
from paceline.communication.torch import groups
from paceline.communication.torch import transport as process
from paceline.errors import ClosedError, PeerLostError
from paceline.rules.codec.dense import Dense
from paceline.rules.codec.layout import Layout
from paceline.rules.topology import Hierarchical
from paceline.update.exchange.pipeline import Pipeline
from tests.processes.together import all_here, run_named
from tests.rules.topology.test_routes import finish

RANK = int(os.environ.get("RANK", "0"))


def operations(transport: Transport) -> dict[str, Any]:
    """Every operation once; what came out and what was counted. Alike on virtual workers."""
    rank, size = transport.world.rank, transport.world.size
    found: dict[str, Any] = {}

    def note(name: str, before: int, *tensors: torch.Tensor) -> None:
        found[name] = [t.tolist() for t in tensors] + [transport.bytes_sent - before]

    for dtype in (torch.uint8, torch.float32, torch.int64):
        before = transport.bytes_sent
        sizes_in = [(rank * 3 + j) % 4 for j in range(size)]
        sizes_out = [(j * 3 + rank) % 4 for j in range(size)]
        x = (torch.arange(sum(sizes_in)) + 50 * rank).to(dtype)
        out = torch.empty(sum(sizes_out), dtype=dtype)
        transport.all_to_all(out, x, sizes_out, sizes_in).wait()
        note(f"parts {dtype}", before, out)
    before = transport.bytes_sent
    out = torch.empty(0)
    transport.all_to_all(out, torch.empty(0), [0] * size, [0] * size).wait()
    rows, mine = torch.arange(size * 3.0).view(size, 3) * 10.0**rank, torch.empty(3)
    transport.reduce_scatter(mine, rows).wait()
    note("reduce_scatter", before, mine)
    before = transport.bytes_sent
    x = torch.tensor([1.0, rank])
    transport.all_reduce(x).wait()
    b = torch.tensor([rank])
    transport.broadcast(b, size - 1).wait()
    note("all_reduce, broadcast", before, x, b)
    before = transport.bytes_sent
    after, ahead = (rank + 1) % size, (rank - 1) % size
    first, second = torch.empty(2), torch.empty(1)
    pending = [transport.receive(first, ahead), transport.receive(second, ahead)]
    pending += [transport.send(torch.tensor([1.0, rank]), after), transport.send(torch.tensor([2.0]), after)]
    for one in reversed(pending):
        one.wait()
    note("messages", before, first, second)
    return found


def parts(transport: Transport) -> list[Any]:
    """A part, a part of it, and their channels: who is there, what is summed, what is counted."""
    found: list[Any] = []
    part = transport.part([[0, 2], [3, 1]])
    inner = part.part([[0], [1]])
    for one in (part, inner):
        one.open_channels(2)
        x = torch.tensor([float(10**transport.world.rank)])
        before = transport.bytes_sent
        one.channel(1).all_reduce(x).wait()
        world = one.world
        found.append([world.rank, world.size, world.local_rank, list(world.hosts), float(x)])
        found.append(transport.bytes_sent - before)
    return found


def all_of_it(directory: Path) -> None:
    """Operations on the connection, on a channel, on a part, and over a group of the user's."""
    transport = connect(60)
    transport.open_channels(2)
    transport.open_channels(3)
    said: dict[str, Any] = {"all": operations(transport), "channel": operations(transport.channel(2))}
    said["parts"] = parts(transport)
    said["threads"] = threads(transport)
    left = transport.all_reduce(torch.ones(1))
    dist.barrier()
    transport.close()
    said["closed"] = []
    for late in (left.wait, lambda: transport.channel(1).barrier(), lambda: transport.open_channels(99)):
        try:
            late()
        except ClosedError as error:
            said["closed"].append(str(error))
    # members that have made different numbers of groups before, and a connection made again over the same members
    first = dist.new_group([0, 1])
    users = dist.new_group([1, 2, 3], timeout=timedelta(seconds=60))
    for _ in range(2):
        if RANK > 0:
            over = connect(60, users)
            over.open_channels(2)
            said["users"] = operations(over.channel(1))
            over.close()
    del first
    (directory / f"said.{RANK}").write_text(json.dumps(said))
    dist.barrier()


def threads(transport: Transport, channels: int = 6, rounds: int = 20) -> list[float]:
    """Operations on channels from threads that go their own way on every worker."""
    transport.open_channels(channels + 1)
    totals = [0.0] * channels
    before = transport.bytes_sent

    def work(k: int) -> None:
        channel = transport.channel(k + 1)
        for number in range(rounds):
            x = torch.full((1000,), float(number + k))
            channel.all_reduce(x).wait()
            totals[k] += float(x[0])

    running = [threading.Thread(target=work, args=(k,)) for k in range(channels)]
    for k in torch.randperm(channels, generator=torch.Generator().manual_seed(RANK)).tolist():
        running[k].start()
    for thread in running:
        thread.join()
    return [*totals, transport.bytes_sent - before]


def endless(directory: Path, timeout_s: str) -> None:
    """Threads on channels and in a part, until something happens; each says what it raised."""
    transport = connect(float(timeout_s))
    transport.open_channels(4)
    part = transport.part([[0, 1], [2, 3]])
    said: list[str] = []

    def work(channel: Transport, number: int) -> None:
        last = time.monotonic()
        try:
            for step in range(10**9):
                x = torch.ones(50_000)
                last = time.monotonic()
                channel.all_reduce(x).wait()
                if step == 20:
                    (directory / f"going.{RANK}.{number}").touch()
        except PeerLostError as error:
            said.append(f"{time.monotonic() - last:.1f} s: {error}")

    places = [*(transport.channel(k) for k in range(4)), part]
    running = [threading.Thread(target=work, args=(place, k)) for k, place in enumerate(places)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    try:
        transport.barrier()
    except PeerLostError as error:
        said.append(f"later: {error}")
    (directory / f"error.{RANK}").write_text("\n".join(said))


ROUTES: list[tuple[Any, list[str], bool]] = [
    ((2, 2), ["h"] * 4, True),
    ("hosts", ["a", "b", "a", "b"], True),
    ("hosts", ["a", "a", "b", "a"], True),
    ("hosts", ["a", "a", "b", "b"], False),
]
"""Dimensions, hosts of four workers, and whether the slowest dimension is summed in rank order."""


def numbers(elements: int, rank: int) -> torch.Tensor:
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def summed(transport: Transport, dimensions: Any, ordered: bool) -> list[torch.Tensor]:
    """A chunked float32 tensor and a whole int64 one over the hierarchical route, and the bytes of the first."""
    topology = Hierarchical(dimensions, ordered=ordered)
    route, elements = topology.route(transport, 1), 1000
    x = numbers(elements, transport.world.rank)
    layout = Layout.vector(elements)
    assert route.plan.bytes_sent(Dense(), layout, transport.world.rank) == topology.bytes_sent(
        Dense(), layout, transport.world.hosts, transport.world.rank
    )
    before = transport.bytes_sent
    total, _ = finish(route.exchange(Dense(), x.clone(), layout, {}))
    sent = transport.bytes_sent - before
    if not ordered:
        assert sent == route.plan.bytes_sent(Dense(), layout, transport.world.rank)
    whole, _ = finish(route.exchange(Dense(), (x * 1e3).long(), layout, {}))
    pieces = x.clone()
    # chunks of many and of few numbers in turn: of one number, most workers own nothing
    ends = [0, 150, 151, 300, 302, 500, 501, 502, 800, 801, elements]
    pipeline = Pipeline(transport.background, route.stages)
    exchanges = [
        pipeline.start(route.exchange(Dense(), pieces[low:high], layout.cut(low, high), {}))
        for low, high in pairwise(ends)
    ]
    for exchange in exchanges:
        exchange.finish()
    pipeline.close()
    return [total, whole, pieces, torch.tensor(sent)]


def hierarchical(directory: Path) -> None:
    """Every row of ROUTES on a connection of its own, whose workers believe to be where the row says."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for number, (dimensions, hosts, ordered) in enumerate(ROUTES):
        process.host_name = lambda hosts=hosts: hosts[RANK]  # type: ignore[assignment, misc]
        transport = connect(60)
        found = summed(transport, dimensions, ordered)
        save_file({str(k): x for k, x in enumerate(found)}, directory / f"{number}.{RANK}.safetensors")
        transport.close()
    dist.barrier()
    dist.destroy_process_group()


def absent(directory: Path) -> None:
    """Rank 1 does not come to open a channel."""
    all_here(directory)
    transport = connect(3)
    if RANK == 0:
        try:
            transport.open_channels(2)
        except PeerLostError as error:
            (directory / "error.0").write_text(str(error))
    else:
        os._exit(0)


def silent(directory: Path) -> None:
    """Rank 0 waits for a message that nobody sends."""
    all_here(directory)
    transport = connect(3)
    if RANK == 0:
        try:
            transport.receive(torch.empty(1), 1).wait()
        except PeerLostError as error:
            (directory / "error.0").write_text(str(error))
    else:
        try:
            transport.barrier()
        except PeerLostError:
            (directory / "error.1").touch()


def dropped(directory: Path) -> None:
    """Rank 0 closes its connection while an operation of it waits for rank 1."""
    all_here(directory)
    transport = connect(600)
    if RANK == 0:
        transport.all_reduce(torch.ones(1))
        transport.close()
        (directory / "closed").touch()
    else:
        while not (directory / "closed").exists():
            time.sleep(0.01)


def unending(directory: Path, lost: str) -> None:
    """The connection fails at rank 0 while rank 1 waits for rank 2, which never comes.

    If the operation's end is `lost`, rank 1 does not learn of it through the connections.
    """
    if lost == "lost":
        groups.shut_down = lambda ports: None
    all_here(directory)
    transport = connect(600)
    pair = transport.part([[0], [1, 2]])
    transport.barrier()
    try:
        if RANK == 0:
            transport._connection.fail("all_reduce", RuntimeError("for the test"))  # type: ignore[attr-defined]
        elif RANK == 1:
            pair.all_reduce(torch.ones(1)).wait()
    except PeerLostError as error:
        (directory / f"error.{RANK}").write_text(str(error))
    while not (directory / "error.1").exists():  # rank 0 has the store
        time.sleep(0.01)


if __name__ == "__main__":
    run_named(globals(), *sys.argv[1:])
