# SPDX-License-Identifier: Apache-2.0
"""Four workers, one of them five times slower: what each rule makes of the others' speed.

A minibatch is a forward and backward pass of a model of 1.1 M parameters and then a pause, 100 ms for three workers and
500 ms for the fourth (`--fast-ms`), as a device would compute while the host waits. First every worker runs by itself,
all four at once: their speeds add up to what could be had. Then they run under `asgd`, `ssp` and `sync`, for as long.

    python benchmarks/speed/straggler.py [--seconds 20] [--repeats 3] [--fast-ms 100]

The last line is a JSON object: `ratio`, samples per second under asgd over the sum of the workers' own, the median of
the repeats; the same of the others; `runs`, samples per second of each worker, alone and by rule; and the `command`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
import torch.distributed as dist
from _workers import answer, is_worker, launch
from torch import nn

import paceline

WORKERS, BATCH = 4, 16
SLOWER = 5
RULES = ("asgd", "ssp(staleness=3)", "sync")


def minibatches(rank: int, rule: str | None, seconds: float, fast_s: float) -> int:
    """Minibatches that this worker makes in so many seconds, alone or under a rule."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    run = paceline.attach(model, optimizer, rule, timeout_s=60) if rule else None
    x, y = torch.randn(BATCH, 512), torch.randint(10, (BATCH,))
    pause_s = SLOWER * fast_s if rank == WORKERS - 1 else fast_s
    dist.barrier()
    ends, made = time.perf_counter() + seconds, 0
    while time.perf_counter() < ends:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        time.sleep(pause_s)
        optimizer.step()
        made += 1
    if run is not None:
        run.close()
    return made


def worker(seconds: float, fast_s: float) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {}
    for rule in (None, *RULES):
        everybody = torch.zeros(WORKERS)
        everybody[rank] = minibatches(rank, rule, seconds, fast_s)
        dist.all_reduce(everybody)
        found[rule or "alone"] = (everybody * BATCH / seconds).tolist()
    answer(found)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rule")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fast-ms", type=float, default=100.0, help="of three workers' minibatches")
    options = _quick.parse(parser, seconds=1.0, repeats=1)
    if is_worker():
        worker(options.seconds, options.fast_ms / 1e3)
        return
    given = ["--seconds", str(options.seconds), "--fast-ms", str(options.fast_ms)]
    runs = [launch(__file__, given, WORKERS, 600) for _ in range(options.repeats)]
    print(f"{'':18} samples/s of each worker        sum    over alone")
    ratios: dict[str, float] = {}
    for name in runs[0]:
        rates = [statistics.median(run[name][rank] for run in runs) for rank in range(WORKERS)]
        ratios[name] = statistics.median(sum(run[name]) / sum(run["alone"]) for run in runs)
        print(f"{name:18} {' '.join(f'{rate:7.1f}' for rate in rates)} {sum(rates):9.1f} {ratios[name]:10.3f}")
    others = {name.split("(")[0]: round(ratios[name], 3) for name in RULES[1:]}
    print(json.dumps({"ratio": round(ratios["asgd"], 3), **others, "runs": runs, "command": " ".join(sys.argv)}))


if __name__ == "__main__":
    main()
