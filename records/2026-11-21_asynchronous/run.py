# SPDX-License-Identifier: Apache-2.0
"""Train both tasks in every asynchronous way, on a simulated clock; one line of results.jsonl for each training.

What is there already is not made again, so a stop loses nothing::

    python run.py                       # all: two processes, three seeds
    python run.py --seeds 0 --processes 1
    python run.py --quick           every way for a moment, kept apart
    python run.py --other '{"task": "text", "way": "asgd", "rule": "asgd(overlap=0)", "workers": 16,
                            "delays": "geometric", "lr": 4.0, "minibatches": 3200, "seed": 0}'
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import rows
import torch
from rows import Line
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import paceline
from paceline.forecast.sim import simulate
from paceline.forecast.sim.clock import Clock, exponential, uniform
from tasks import TASKS

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results.jsonl"
COMPUTE = {"geometric": exponential(), "uniform": uniform(), None: 1.0}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every asynchronous way on both tasks.")
    parser.add_argument("--seeds", type=int, nargs="+", default=rows.SEEDS)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--other", type=json.loads, nargs="+", help="lines to make instead, as JSON")
    parser.add_argument("--quick", action="store_true", help="every way with 4 workers and few minibatches")
    return parser.parse_args()


def train(line: Line, log: str) -> nn.Module | None:
    """The body of one worker: an ordinary training loop, and the two lines of paceline."""
    torch.manual_seed(line["seed"])
    task = TASKS[line["task"]]
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=line["lr"])
    run = paceline.attach(model, optimizer, line["rule"], seed=line["seed"], log=log)
    share = run.share(task.loader(line["minibatches"]))
    scheduler = LambdaLR(optimizer, lambda step: task.schedule(step / len(share)))
    with run:
        for inputs, targets in share:
            optimizer.zero_grad()
            task.loss(model, inputs, targets).backward()
            if task.largest_gradient is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.largest_gradient)
            optimizer.step()
            scheduler.step()
    return run.model_for_export() if run.world.rank == 0 else None


def measured_delays(log: Path) -> Counter[int]:
    """How many pushes had which delay, from the event log."""
    found: Counter[int] = Counter()
    for path in log.rglob("*.jsonl"):
        for text in path.read_text(encoding="utf-8").splitlines():
            for delay, count in json.loads(text).get("delays", {}).items():
                found[int(delay)] += count
    return found


def one_training(line: Line) -> Line:
    """`line` with what came of it."""
    torch.set_num_threads(1)
    started, cpu = time.perf_counter(), time.process_time()
    with TemporaryDirectory() as log:
        try:
            clock = Clock(compute=COMPUTE[line["delays"]], seed=line["seed"])
            model = simulate(lambda: train(line, log), line["workers"], clock=clock)[0]
            assert model is not None
            line = line | TASKS[line["task"]].result(model)
        except paceline.PacelineError as error:  # a training that blows up is a result, too
            line = line | {"failed": f"{type(error).__name__}: {error}"}
        delays = measured_delays(Path(log))
    if delays:
        line["delay_mean"] = round(sum(d * n for d, n in delays.items()) / delays.total(), 2)
        line["delay_max"] = max(delays)
    return line | {"wall_s": round(time.perf_counter() - started, 1), "cpu_s": round(time.process_time() - cpu, 1)}


def read() -> list[Line]:
    """All lines there are."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def quick() -> None:
    """Every way for a moment, in this process; a training that fails ends it."""
    with (HERE / "quick" / "results.jsonl").open("w") as file:
        for line in rows.lines(TASKS, 0):
            if line["workers"] in (1, 4) and line["delays"] in (None, "geometric"):
                made = one_training(line | {"minibatches": 16})
                file.write(json.dumps(made) + "\n")
                print(json.dumps(made), flush=True)
                if "failed" in made:
                    raise SystemExit(f"{made['way']} failed: {made['failed']}")


def missing(wanted: Iterator[Line]) -> list[Line]:
    """Those that are not in results.jsonl."""
    have = read()
    return [line for line in wanted if not any(line.items() <= other.items() for other in have)]


def main() -> None:
    args = parse_arguments()
    if args.quick:
        quick()
        return
    planned = (line for seed in args.seeds for line in rows.lines(TASKS, seed))
    todo = missing(iter(args.other) if args.other else planned)
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool, RESULTS.open("a") as file:
        for line in pool.imap_unordered(one_training, todo):
            file.write(json.dumps(line) + "\n")
            file.flush()
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
