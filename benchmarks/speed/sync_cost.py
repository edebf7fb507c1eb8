# SPDX-License-Identifier: Apache-2.0
"""What one block synchronisation costs, over one bare all-reduce of as many bytes.

Two processes hold a 100 MB fp32 model (25 tensors of 4 MB). In turn, ten times each, they make one `bmuf`
synchronisation of it and one gloo all-reduce of a flat 100 MB buffer; the figure is the ratio of the medians. On
loopback the passes over memory are the cost; between two network namespaces joined at 1 Gbit/s the network is.
On loopback mpiexec starts the processes, if mpi4py and an MPI are installed: then a row has the all-reduce of the same
buffer over `transport="mpi"`.

What a synchronisation moves beside the all-reduce, over what the memory bus moves meanwhile, is its bound: it packs the
contribution (reads parameters, anchor and Delta, writes the wire memory, which is fetched first) and applies the mean
(reads it; reads and writes Delta and anchor; fetches and writes the parameters), 12 times the model's bytes. The bus is
measured by `x += y` of as many bytes, which moves 3 times these, in both processes at once.

    python benchmarks/speed/sync_cost.py [--repeats 10] [--rate 1000]

The last line is a JSON object: `ratio`, `ratio_1gbit` (null where namespaces cannot be made, with the reason) and
`mpi_ratio`, the all-reduce over MPI over gloo's (null without MPI). On loopback also `processor_ratio`, the processor
time of a synchronisation over that of an all-reduce, which other programs disturb less; `moved_gb` and `bus_gb_s`, the
bytes of the bound and the bus of one process; and `bound_ratio`, an all-reduce and the bound in a row over an
all-reduce: less is had only where they overlap.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
import torch.distributed as dist
from _workers import Hosts, answer, is_worker, launch, launch_under_mpi, mpiexec
from torch import nn

import paceline
from paceline.communication import connect

TENSORS, ELEMENTS = 25, 1_000_000
PASSES, BUS_PASSES = 12, 3
"""How often the model's bytes cross the memory bus in a synchronisation, and in what measures the bus."""


class Model(nn.Module):
    """Parameters that nobody computes with, of 25 tensors."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(1000, elements // 1000)) for _ in range(TENSORS))


def attached(elements: int = ELEMENTS) -> tuple[Model, torch.optim.Optimizer, paceline.Run]:
    """One rank of the group, which holds the model; a step of the optimizer is a block of one minibatch."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(elements)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, paceline.attach(model, optimizer, "bmuf(period=1)")


def timed(action: Callable[[], Any]) -> float:
    """Seconds that `action` takes, from a common start."""
    return timed_both(action)[0]


def timed_both(action: Callable[[], Any]) -> tuple[float, float]:
    """Seconds that `action` takes, from a common start, and processor seconds of all threads of this process."""
    dist.barrier()
    began, processor = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - began, time.process_time() - processor


def torchft_row(elements: int) -> Callable[[], Any] | None:
    """The nearest peer's synchronisation of the same model, where it is installed: its steps over the same gloo."""
    try:
        from torchft.local_sgd import DiLoCo
    except ImportError:
        return None
    from unittest.mock import create_autospec

    from torchft.manager import Manager

    model, manager = Model(elements), create_autospec(Manager)
    manager._use_async_quorum = False
    manager.should_commit.return_value = True
    manager.current_step.return_value = 0

    def allreduce(tensor: torch.Tensor, **_: Any) -> Any:
        work = dist.all_reduce(tensor, async_op=True)
        return work

    manager.allreduce.side_effect = allreduce
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    diloco = DiLoCo(manager, [model], inner, outer, sync_every=1)
    diloco.__enter__()

    def sync() -> None:
        inner.step()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return sync


def worker(repeats: int, elements: int) -> None:
    """One rank: time both in turn."""
    model, optimizer, run = attached(elements)
    flat, other = torch.randn(TENSORS * elements), torch.zeros(TENSORS * elements)
    rows: dict[str, list[float]] = {}
    over_mpi = connect(600, None, "mpi") if "PMI_RANK" in os.environ else None
    for repeat in range(repeats + 2):
        with torch.no_grad():
            for weight in model.weights:
                weight.add_(0.01)
        found: dict[str, float] = {}
        found["bmuf"], found["bmuf_processor"] = timed_both(optimizer.step)  # no gradients: only the synchronisation
        found["all_reduce"], found["all_reduce_processor"] = timed_both(lambda: dist.all_reduce(flat))
        found["bus"] = timed(lambda: flat.add_(other))
        flat.mul_(0.5)
        if over_mpi is not None:
            found["mpi"] = timed(lambda: over_mpi.all_reduce(flat).wait())
            flat.mul_(0.5)
        for name, seconds in found.items() if repeat >= 2 else ():  # the first touch of memory is not what is measured
            rows.setdefault(name, []).append(seconds)
    run.close()
    peer = torchft_row(elements)
    if peer is not None:
        rows["torchft"] = [timed(peer) for _ in range(repeats + 2)][2:]
    answer({name: statistics.median(values) for name, values in rows.items()})


def bound(medians: dict[str, float], model_bytes: int) -> dict[str, float | None]:
    """What the memory bus allows on loopback, from the medians there; see the top."""
    bus = BUS_PASSES * model_bytes / medians["bus"]
    moved = PASSES * model_bytes
    return {
        "processor_ratio": round(medians["bmuf_processor"] / medians["all_reduce_processor"], 3),
        "moved_gb": moved / 1e9,
        "bus_gb_s": round(bus / 1e9, 1),
        "bound_ratio": round(1 + moved / bus / medians["all_reduce"], 3),
    }


def main() -> None:
    """Run both settings and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--rate", type=float, default=1000.0, help="Mbit/s between the namespaces")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of each of 25 tensors")
    options = _quick.parse(parser, repeats=2, elements=ELEMENTS // 10)
    if is_worker():
        worker(options.repeats, options.elements)
        return
    arguments = ["--repeats", str(options.repeats), "--elements", str(options.elements)]
    start = launch_under_mpi if mpiexec() else launch
    results = {"loopback": start(__file__, arguments, 2, 600)}
    reason = Hosts.possible()
    if not reason:
        with Hosts(options.rate) as hosts:
            results[f"{options.rate:g} Mbit/s"] = launch(__file__, arguments, 2, 900, hosts)
    print(f"{'network':14} {'what':20} {'median':>10} {'over all-reduce':>16}")
    for network, medians in results.items():
        for name, seconds in medians.items():
            print(f"{network:14} {name:20} {1e3 * seconds:7.1f} ms {seconds / medians['all_reduce']:16.3f}")
    ratios = [medians["bmuf"] / medians["all_reduce"] for medians in results.values()]
    found = {"ratio": round(ratios[0], 3), "ratio_1gbit": round(ratios[1], 3) if len(ratios) > 1 else None}
    found |= bound(results["loopback"], 4 * TENSORS * options.elements)
    over_mpi = results["loopback"].get("mpi")
    found["mpi_ratio"] = round(over_mpi / results["loopback"]["all_reduce"], 3) if over_mpi is not None else None
    if reason:
        found["no_1gbit_because"] = reason
    print(json.dumps(found))


if __name__ == "__main__":
    main()
