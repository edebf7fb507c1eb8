# SPDX-License-Identifier: Apache-2.0
"""How fast rings over paceline's own sockets sum 100 MB, over gloo's all-reduce of the same tensor.

Elastic runs, and `transport="channel"`, exchange over these rings. Two and four processes on loopback, and two hosts
(network namespaces) joined at 1 and 10 Gbit/s, hold a tensor of 100 MB. In turn, as often as `--rounds` says, they sum
it over gloo, over a ring, over a ring with TLS, and over bare sockets with the same algorithm and no frames (the most
that a ring in Python can reach), each time from a common start. A figure is the median over the rounds of gloo's
seconds over the ring's in the same round, so that another program on the machine slows both. The time is that of the
slowest process.

    python benchmarks/speed/ring.py [--mb 100] [--rounds 15] [--networks loopback2 loopback4 1gbit 10gbit]

The last line is a JSON object: `over_gloo` (the lesser of two and four processes on loopback), `over_gloo_1gbit` and
`over_gloo_10gbit` (null where namespaces cannot be made, with the reason), `tls_over_plain` (the ring's seconds without
TLS over those with it, the lesser on loopback), and for each network under `rate` those figures of all ways, under
`seconds` the medians, under `least` the fewest seconds, which other programs on the machine disturb least, and under
`processor` the processor seconds of all processes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
import torch.distributed as dist
from _ring_bare import BareRing, neighbours
from _workers import Hosts, answer, is_worker, launch

from paceline.communication import connect
from paceline.communication.base import Transport
from paceline.communication.sockets.certificates import Authority
from paceline.communication.sockets.tls import TLS
from paceline.communication.torch.store import own_address

NETWORKS: dict[str, tuple[int, float]] = {
    "loopback2": (2, 0.0),
    "loopback4": (4, 0.0),
    "1gbit": (2, 1000.0),
    "10gbit": (2, 10_000.0),
}
"""Processes, and Mbit/s between their hosts; 0 for one host."""
WARM_ROUNDS = 2
DEADLINE_S = 600.0


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that `action` takes from a common start, and this process's processor seconds in it."""
    dist.barrier()
    began, busy = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - busy


def bare_ring(x: torch.Tensor, ring: Transport) -> BareRing:
    """Over connections of its own; `ring` carries the addresses."""
    rank, size = dist.get_rank(), dist.get_world_size()
    return BareRing(x, rank, size, *neighbours(rank, size, own_address(os.environ["MASTER_ADDR"]), ring.gather_json))


def worker(options: argparse.Namespace) -> None:
    """One rank: sum in turn over each connection."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with contextlib.ExitStack() as stack:
        ring = connect(DEADLINE_S, dist.group.WORLD, "channel")
        secure = connect(DEADLINE_S, dist.group.WORLD, "channel", TLS.folder(options.tls))
        for one in (ring, secure):
            stack.callback(one.close)
        x = torch.ones(options.mb * 250_000)
        ways: dict[str, Callable[[], Any]] = {
            "gloo": lambda: dist.all_reduce(x),
            "ring": lambda: ring.all_reduce(x).wait(),
            "tls": lambda: secure.all_reduce(x).wait(),
            "bare": bare_ring(x, ring).all_reduce,
        }
        rows = torch.empty(options.rounds, len(ways), 2)
        for turn in range(-WARM_ROUNDS, options.rounds):
            for place, way in enumerate(ways.values()):
                x.fill_(1.0)
                took = torch.tensor(timed(way))
                if not bool((x == dist.get_world_size()).all()):
                    raise SystemExit(f"a sum of ones over {dist.get_world_size()} workers is {x.unique()[:5].tolist()}")
                if turn >= 0:
                    rows[turn, place] = took
        seconds, busy = rows[:, :, 0].contiguous(), rows[:, :, 1].contiguous()
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(busy)
        answer({name: [seconds[:, k].tolist(), busy[:, k].tolist()] for k, name in enumerate(ways)})
        dist.barrier()


def measured(network: str, options: argparse.Namespace, tls: str) -> dict[str, Any]:
    """The workers' rows on that network."""
    workers, rate = NETWORKS[network]
    arguments = ["--mb", str(options.mb), "--rounds", str(options.rounds), "--tls", tls]
    if not rate:
        return launch(__file__, arguments, workers, DEADLINE_S)
    with Hosts(rate) as hosts:
        return launch(__file__, arguments, workers, DEADLINE_S, hosts)


def ratio(rows: dict[str, Any], one: str, other: str) -> float:
    """The median over the rounds of `one`'s seconds over `other`'s."""
    return round(statistics.median(a / b for a, b in zip(rows[one][0], rows[other][0], strict=True)), 3)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """What the last line says."""
    loopback = [rows for network, rows in found.items() if not NETWORKS[network][1]]
    over = [ratio(rows, "gloo", "ring") for rows in loopback]
    summed: dict[str, Any] = {
        "over_gloo": min(over, default=None),
        **{f"over_gloo_{name}": ratio(found[name], "gloo", "ring") if name in found else None for name in NETWORKS},
        "tls_over_plain": min((ratio(rows, "ring", "tls") for rows in loopback), default=None),
    }
    summed["rate"] = {network: {way: ratio(rows, "gloo", way) for way in rows} for network, rows in found.items()}
    for what, place, chosen in (
        ("seconds", 0, statistics.median),
        ("least", 0, min),
        ("processor", 1, statistics.median),
    ):
        summed[what] = {
            network: {way: round(chosen(row[place]), 4) for way, row in rows.items()} for network, rows in found.items()
        }
    return summed


def main() -> None:
    """Measure on each network, and print the table."""
    parser = argparse.ArgumentParser(description="Rings over paceline's own sockets, over gloo.")
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--networks", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    parser.add_argument("--tls", help="folder of a worker's certificate; for the workers")
    options = _quick.parse(parser, mb=4, rounds=2)
    if is_worker():
        worker(options)
        return
    reason = Hosts.possible()
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        Authority.new().issue(Path(folder) / "worker", "worker")
        for network in options.networks:
            if reason and NETWORKS[network][1]:
                continue
            found[network] = measured(network, options, str(Path(folder) / "worker"))
            for way, (seconds, busy) in found[network].items():
                middle, least, processors = (1e3 * one for one in (statistics.median(seconds), min(seconds), sum(busy)))
                print(
                    f"{network:10} {way:5} {middle:8.1f} ms, least {least:8.1f} ms, of processors "
                    f"{processors / len(busy):8.1f} ms, over gloo {ratio(found[network], 'gloo', way):6.3f}"
                )
    summed = figures(found)
    if reason:
        summed["no_links_because"] = reason
    print(json.dumps(summed))


if __name__ == "__main__":
    main()
