# SPDX-License-Identifier: Apache-2.0
"""The hierarchical all-reduce over the bound of its slow links, and over gloo's flat all-reduce.

Eight processes on two hosts (network namespaces), four on each; memory speed inside, 200 Mbit/s between. In turn, they
sum 20 MB by gloo's all-reduce among all eight and over the hierarchical route (4, 2), in chunks that are under way
together. The bound is the time for the bytes that have to cross, S each way for two hosts, at the link's nominal rate
with headers of TCP, IP and Ethernet left out: nobody can be faster, and full frames alone cost 1.046 of it.

    python benchmarks/speed/hierarchical.py [--megabytes 20] [--repeats 7] [--rate 200]

The last line is a JSON object: `over_bound`, `over_flat` (ratios of medians), `slow_bytes_over_formula` (what the
interfaces sent less 66 bytes a packet, over what the formula says) and the medians in seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
import torch.distributed as dist
from _workers import Hosts, answer, is_quick, is_worker, launch
from torch import Tensor

from paceline.communication import connect
from paceline.rules.codec.dense import Dense
from paceline.rules.codec.layout import Layout
from paceline.rules.topology import Hierarchical
from paceline.update.exchange.pipeline import Pipeline

PER_HOST, HEADER_BYTES = 2 if is_quick() else 4, 66


class Packed:
    """Several workers on each of two hosts.

    Args:
        hosts: the namespaces.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts

    def address(self, rank: int) -> str:
        """The address of the host of `rank`."""
        return self._hosts.address(rank // PER_HOST)

    def interface(self, rank: int) -> str:
        """The interface of the host of `rank`; what goes to its own address does not leave the host."""
        return self._hosts.interface(rank // PER_HOST)

    def prefix(self, rank: int) -> list[str]:
        """What runs a command on the host of `rank`."""
        return self._hosts.prefix(rank // PER_HOST)


def sent_across() -> int:
    """Bytes that have left this host so far, without the headers of their packets."""
    place = Path(f"/sys/class/net/{os.environ['GLOO_SOCKET_IFNAME']}/statistics")
    nbytes, packets = (int((place / name).read_text()) for name in ("tx_bytes", "tx_packets"))
    return nbytes - HEADER_BYTES * packets


def timed(action: Callable[[], Any]) -> float:
    """Seconds that `action` takes, from a common start to the last worker's end."""
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def worker(megabytes: float, repeats: int) -> None:
    """One rank: time both in turn."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport = connect(120)
    rank, elements = transport.world.rank, int(megabytes * 1e6) // 4
    topology, layout = Hierarchical((PER_HOST, 2)), Layout.vector(elements)
    route = topology.route(transport, 1)
    pipeline = Pipeline(transport.background, route.stages)
    cuts = [elements * k // topology.chunks for k in range(topology.chunks + 1)]
    chunks = list(pairwise(cuts))
    formula = sum(route.plan.bytes_sent(Dense(), layout.cut(low, high), rank) for low, high in chunks)
    across = sum(route.plan.slow_bytes(Dense(), layout.cut(low, high), rank) for low, high in chunks)
    given = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
    x, flat = given.clone(), given.clone()

    def hierarchical() -> None:
        under_way = [
            pipeline.start(route.exchange(Dense(), x[low:high], layout.cut(low, high), {})) for low, high in chunks
        ]
        for exchange in under_way:
            exchange.finish()

    rows: dict[str, list[float]] = {"hierarchical": [], "flat": [], "sent": []}
    for repeat in range(repeats + 1):
        for tensor in (x, flat):
            tensor.copy_(given)
        dist.barrier()
        counted, left = transport.bytes_sent, sent_across()
        seconds = timed(hierarchical)
        sent = sent_across() - left
        assert transport.bytes_sent - counted == formula, "the count is not what the formula says"
        flat_s = timed(lambda: dist.all_reduce(flat))
        torch.testing.assert_close(x, flat, rtol=1e-4, atol=1e-4)
        if repeat:  # the first touch of memory is not what is measured
            rows["hierarchical"].append(seconds)
            rows["flat"].append(flat_s)
            rows["sent"].append(sent)
    said = transport.gather_json({"across": across, "sent": rows["sent"], "same": _same(x, transport.gather_json)})
    ends = said[::PER_HOST]  # one worker of each host
    per_host = [sum(one["across"] for one in said[k : k + PER_HOST]) for k in range(0, len(said), PER_HOST)]
    ratios = [statistics.median(end["sent"]) / want for end, want in zip(ends, per_host, strict=True)]
    answer(
        {
            "hierarchical_s": statistics.median(rows["hierarchical"]),
            "flat_s": statistics.median(rows["flat"]),
            "spread": [min(rows["hierarchical"]), max(rows["hierarchical"]), min(rows["flat"]), max(rows["flat"])],
            "across_bytes": max(per_host),
            "slow_bytes_over_formula": max(ratios),
        }
    )
    pipeline.close()
    transport.close()
    dist.barrier()
    dist.destroy_process_group()


def _same(x: Tensor, gather: Callable[[Any], list[Any]]) -> bool:
    sums = gather(int(x.view(torch.int32).sum(dtype=torch.int64)))
    assert len(set(sums)) == 1, "the workers hold different bits"
    return True


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--rate", type=float, default=200.0, help="Mbit/s between the hosts, each way")
    options = _quick.parse(parser, megabytes=2.0, repeats=2)
    if is_worker():
        worker(options.megabytes, options.repeats)
        return
    reason = Hosts.possible()
    if reason:
        print(json.dumps({"over_bound": None, "because": reason}))
        return
    arguments = ["--megabytes", str(options.megabytes), "--repeats", str(options.repeats)]
    with Hosts(options.rate) as hosts:
        found = launch(__file__, arguments, 2 * PER_HOST, 600, Packed(hosts))  # type: ignore[arg-type]
    bound_s = found["across_bytes"] * 8 / (options.rate * 1e6)
    low, high, flat_low, flat_high = found["spread"]
    print(f"{'all-reduce':14} {'median':>9} {'least':>9} {'most':>9} {'over the bound':>15}")
    print(f"{'bound':14} {bound_s:7.3f} s")
    for name, median, least, most in (
        ("hierarchical", found["hierarchical_s"], low, high),
        ("gloo, flat", found["flat_s"], flat_low, flat_high),
    ):
        print(f"{name:14} {median:7.3f} s {least:7.3f} s {most:7.3f} s {median / bound_s:15.3f}")
    result = {
        "over_bound": round(found["hierarchical_s"] / bound_s, 3),
        "over_flat": round(found["hierarchical_s"] / found["flat_s"], 3),
        "slow_bytes_over_formula": round(found["slow_bytes_over_formula"], 4),
        "hierarchical_s": round(found["hierarchical_s"], 3),
        "flat_s": round(found["flat_s"], 3),
        "bound_s": round(bound_s, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
