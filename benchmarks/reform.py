# SPDX-License-Identifier: Apache-2.0
"""What gloo does when its members change: how fast it forms again, and when a dead or frozen member is noticed.

Three processes sum a tensor over gloo. The last is killed, or stopped (SIGSTOP, as a machine that hangs), in the middle
of sums. The others' sum must fail, and they form a group of two. A stopped member is what a control plane finds within
its heartbeats; so half a second into each failing sum another thread aborts the group, as a control plane would. Groups
form in two ways: `fresh`, a new process group for each set of members, and `reconfigure`, torch's own way
(`init_process_group(enable_reconfigure=True)`), where this torch has it for gloo.

    python benchmarks/reform.py [--timeout 5] [--times 40]

The last line is a JSON object: `torch`, and for each way under `ways` (null where this torch has none): `forms_ms` (the
median of forming a group of two), `killed_s` and `frozen_s` (seconds from the death to the error of the others' sum),
`frozen_over_timeout` (of the sum's own timeout).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import signal
import statistics
import threading
import time
from datetime import timedelta
from typing import Any

import _quick
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, ProcessGroupGloo, TCPStore, distributed_c10d

MEMBERS, ABORTED_S, HOST = 3, 0.5, "127.0.0.1"
WAYS = ("fresh", "reconfigure")
DEADLINE_S = 120.0


def has(way: str) -> bool:
    """Whether this torch can form groups so; torch 2.14 takes the argument, and gloo ignores it."""
    major, minor = (int(one) for one in torch.__version__.split(".")[:2])
    return way == "fresh" or (hasattr(distributed_c10d, "_reconfigure") and (major, minor) >= (2, 15))


class Groups:
    """The groups of one process, one after the other.

    Args:
        way: of WAYS.
        rank: of this process in the first.
        store: that all processes share.
        timeout: of sums.
    """

    def __init__(self, way: str, rank: int, store: TCPStore, timeout: timedelta) -> None:
        self.way, self.rank, self.store, self.timeout = way, rank, store, timeout
        self.number = 0
        self.group: ProcessGroup | ProcessGroupGloo | None = None
        if way == "reconfigure":
            more: dict[str, Any] = {"enable_reconfigure": True, "timeout": timeout}
            dist.init_process_group("gloo", store=PrefixStore("group", store), rank=rank, world_size=MEMBERS, **more)
            self.group = dist.group.WORLD

    def form(self, size: int) -> None:
        """Form the next group, of the first so many processes."""
        self.number += 1
        if self.way == "fresh":
            self.group = ProcessGroupGloo(PrefixStore(str(self.number), self.store), self.rank, size, self.timeout)
            return
        torch_has: Any = distributed_c10d
        self.store.set(f"handle {self.number} {self.rank}", torch_has._get_reconfigure_handle())
        handles = [self.store.get(f"handle {self.number} {rank}").decode() for rank in range(size)]
        torch_has._reconfigure(self.number, handles, timeout=self.timeout).wait()

    def sum(self, tensor: torch.Tensor) -> None:
        """Sum in place."""
        assert self.group is not None
        self.group.allreduce([tensor]).wait()


def member(way: str, rank: int, port: int, fate: signal.Signals, options: argparse.Namespace, told: Any) -> None:
    """One process."""
    torch.set_num_threads(1)
    store = TCPStore(HOST, port, is_master=False, timeout=timedelta(seconds=DEADLINE_S))
    groups = Groups(way, rank, store, timedelta(seconds=options.timeout))
    groups.form(MEMBERS)
    tensor = torch.ones(options.elements)
    for _ in range(3):
        groups.sum(tensor)
    if rank == MEMBERS - 1:
        store.set("died at", repr(time.time()))
        os.kill(os.getpid(), fate)
    died = float(store.get("died at"))
    abort = threading.Timer(ABORTED_S, groups.group.abort)  # type: ignore[union-attr]
    abort.daemon = True
    abort.start()
    try:
        for _ in range(2):  # the first may still be whole
            groups.sum(tensor)
    except RuntimeError:
        failed = time.time() - died
    else:
        failed = float("inf")
    store.wait([f"failed {other}" for other in range(rank)])  # all form together
    store.set(f"failed {rank}", "")
    seconds = []
    for _ in range(options.times):
        began = time.perf_counter()
        groups.form(MEMBERS - 1)
        seconds.append(time.perf_counter() - began)
    checked = torch.ones(1)
    groups.sum(checked)
    if rank == 0:
        told.put((failed, statistics.median(seconds), checked.item()))
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(MEMBERS - 1)])
    told.close()
    told.join_thread()
    os._exit(0)  # gloo's threads wait for the stopped one


def measured(way: str, fate: signal.Signals, options: argparse.Namespace) -> tuple[float, float]:
    """Seconds until a death was noticed, and of forming a group."""
    spawn = multiprocessing.get_context("spawn")
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    told = spawn.Queue()
    members = [
        spawn.Process(target=member, args=(way, rank, store.port, fate, options, told)) for rank in range(MEMBERS)
    ]
    try:
        for one in members:
            one.start()
        noticed, formed, total = told.get(timeout=DEADLINE_S)
    except queue.Empty:
        raise SystemExit(f"{way}: no figure within {DEADLINE_S:g} s after {fate.name}") from None
    finally:
        for one in members:
            one.kill()
            one.join()
    if total != MEMBERS - 1:
        raise SystemExit(f"{way}: {MEMBERS - 1} members have the sum {total:g} of ones")
    return noticed, formed


def main() -> None:
    """Measure, print a line for each way and the JSON."""
    parser = argparse.ArgumentParser(description="gloo with members that change.")
    parser.add_argument("--timeout", type=float, default=5.0, help="of a sum, seconds")
    parser.add_argument("--times", type=int, default=40, help="groups to form")
    parser.add_argument("--elements", type=int, default=1_000_000)
    options = _quick.parse(parser, timeout=2.0, times=3, elements=1000)
    ways: dict[str, Any] = {}
    for way in WAYS:
        ways[way] = None
        if has(way):
            killed, formed = measured(way, signal.SIGKILL, options)
            frozen, _ = measured(way, signal.SIGSTOP, options)
            ways[way] = {
                "forms_ms": round(1e3 * formed, 2),
                "killed_s": round(killed, 3),
                "frozen_s": round(frozen, 3),
                "frozen_over_timeout": round(frozen / options.timeout, 3),
            }
        print(f"{way:12} {ways[way] or 'not with this torch'}")
    print(json.dumps({"torch": torch.__version__, "ways": ways}))


if __name__ == "__main__":
    main()
