# SPDX-License-Identifier: Apache-2.0
"""A synchronisation of 100 MB whose first chunks leave while later ones are packed, beside one in which they wait.

Both, and a bare all-reduce, take turns in one pair of processes; else as `benchmarks/speed/sync_cost.py`.

    python records/2026-11-21_cost/early.py [--repeats 15]

Prints a JSON object: network -> row -> the median and the least in milliseconds; `early`, `waiting`, `all_reduce`, and
the processor milliseconds of each. Without root, on loopback only.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

sys.path.extend(str(Path(__file__).resolve().parents[2] / "benchmarks" / folder) for folder in ("speed", "common"))

import torch
import torch.distributed as dist
from _workers import Hosts, answer, is_worker, launch
from sync_cost import ELEMENTS, TENSORS, attached, timed_both

from paceline.update.exchange.exchanger import Exchanger


def worker(repeats: int, elements: int) -> None:
    """One rank: time all three in turn; the first two rounds touch memory for the first time."""
    model, optimizer, run = attached(elements)
    flat, found = torch.randn(TENSORS * elements), defaultdict[str, list[float]](list)
    exchangers = [one for one in gc.get_objects() if type(one) is Exchanger]
    for turn in range(repeats + 2):
        for name in ("early", "waiting") if turn % 2 else ("waiting", "early"):
            for exchanger in exchangers:
                exchanger.sends_early = name == "early"
            with torch.no_grad():
                for weight in model.weights:
                    weight.add_(0.01)
            note(found, name, timed_both(optimizer.step))
        note(found, "all_reduce", timed_both(lambda: dist.all_reduce(flat)))
        flat.mul_(0.5)
    run.close()
    medians = {name: statistics.median(values[2:]) for name, values in found.items()}
    answer(medians | {f"{name}_least": min(values[2:]) for name, values in found.items()})


def note(found: dict[str, list[float]], name: str, seconds: tuple[float, float]) -> None:
    """Keep milliseconds of the wall clock and of the processor."""
    found[name].append(1e3 * seconds[0])
    found[f"{name}_processor"].append(1e3 * seconds[1])


def main() -> None:
    """On loopback, and at 1 Gbit/s."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of each tensor")
    options = parser.parse_args()
    if is_worker():
        worker(options.repeats, options.elements)
        return
    arguments = ["--repeats", str(options.repeats), "--elements", str(options.elements)]
    results = {"loopback": launch(__file__, arguments, 2, 600)}
    if not Hosts.possible():  # it gives the reason why not
        with Hosts(1000.0) as hosts:
            results["1 Gbit/s"] = launch(__file__, arguments, 2, 600, hosts)
    print(json.dumps({net: {name: round(ms, 1) for name, ms in rows.items()} for net, rows in results.items()}))


if __name__ == "__main__":
    main()
