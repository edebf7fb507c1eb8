# SPDX-License-Identifier: Apache-2.0
"""Four workers, one of them five times slower: what each rule makes of the others' speed.

A minibatch is a forward and backward pass of a model of 1.1 M parameters and then a pause, 100 ms for three workers and
500 ms for the fourth (`--fast-ms`, `--speeds`), as a device would compute while the host waits. First every worker runs
by itself, all four at once: their speeds add up to what could be had. Then they train together on a data set that takes
about as long: under asynchronous rules, in blocks that end by time, under `sync` and `auto`.

    python benchmarks/speed/straggler.py [--seconds 20] [--repeats 3] [--fast-ms 100] [--speeds 1,1,1,0.2]

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
from torch.utils.data import DataLoader, TensorDataset

import paceline

BATCH = 16
RULES = ("asgd", "ssp(staleness=3)", "sync", "bmuf(period=16, even=False)", "auto")


def rate(rule: str | None, seconds: float, pause_s: float, together: int) -> float:
    """Samples a second of this worker: alone for so many seconds, or under a rule, of so many minibatches of all."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(BATCH * together, 512), torch.randint(10, (BATCH * together,)))
    loader = DataLoader(data, BATCH, shuffle=True)
    run = paceline.attach(model, optimizer, rule, timeout_s=60) if rule else None
    dist.barrier()
    began, made = time.perf_counter(), 0
    for x, y in run.share(loader) if run is not None else loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        time.sleep(pause_s)
        optimizer.step()
        made += 1
        if run is None and time.perf_counter() - began > seconds:
            break
    if run is not None:
        run.close()
    return made * BATCH / (time.perf_counter() - began)


def worker(seconds: float, pauses_s: list[float]) -> None:
    """One rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, found, together = dist.get_rank(), dict[str, Any](), int(1 + seconds / min(pauses_s))
    for rule in (None, *RULES):
        everybody = torch.zeros(len(pauses_s))
        everybody[rank] = rate(rule, seconds, pauses_s[rank], together)
        dist.all_reduce(everybody)
        found[rule or "alone"] = everybody.tolist()
        together = int(1 + seconds * sum(found["alone"]) / BATCH)
    answer(found)


def main() -> None:
    """Run, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of each rule")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fast-ms", type=float, default=100.0, help="of three workers' minibatches")
    parser.add_argument("--speeds", default="1,1,1,0.2", help="of the workers")
    options = _quick.parse(parser, seconds=1.0, repeats=1)
    pauses_s = [options.fast_ms / 1e3 / float(speed) for speed in options.speeds.split(",")]
    if is_worker():
        worker(options.seconds, pauses_s)
        return
    given = ["--seconds", str(options.seconds), "--fast-ms", str(options.fast_ms), "--speeds", options.speeds]
    runs = [launch(__file__, given, len(pauses_s), 600) for _ in range(options.repeats)]
    print(f"{'':28} samples/s of each worker        sum    over alone")
    ratios: dict[str, float] = {}
    for name in runs[0]:
        rates = [statistics.median(run[name][rank] for run in runs) for rank in range(len(pauses_s))]
        ratios[name] = statistics.median(sum(run[name]) / sum(run["alone"]) for run in runs)
        print(f"{name:28} {' '.join(f'{rate:7.1f}' for rate in rates)} {sum(rates):9.1f} {ratios[name]:10.3f}")
    others = {name.split("(")[0]: round(ratios[name], 3) for name in RULES[1:]}
    print(json.dumps({"ratio": round(ratios["asgd"], 3), **others, "runs": runs, "command": " ".join(sys.argv)}))


if __name__ == "__main__":
    main()
