# SPDX-License-Identifier: Apache-2.0
"""Does `auto` stand still, and does it choose well?

It stands still where the same program, run by `paceline run` on two workers, gets the same rule each time: `--idle`
runs on this machine as it is, `--loaded` ones beside four busy processes, and a `--long` one beside them.

It chooses well where no rule chosen by hand is faster, on links of several speeds. Each worker has a host of its own (a
network namespace with a shaped cable to a switch; "loopback" is one host without any), and an emulated accelerator,
whose computing is a timed wait: two cores could not compute for all workers, and a real model's computing would be
slowed down by what is measured. Parameters, gradients and exchanges are real. On each link the same processes train
under every rule in turn, round after round. A rule is attached anew, makes a block (`auto` its probe and its first
blocks: `--settle` steps), and then whole blocks are timed, all workers together. A rule's figure is the median of the
rounds. A rule is comparable with `auto` if it exchanges at least as often: longer blocks are faster and lose quality.

    python benchmarks/speed/steady.py [--idle 20] [--loaded 20] [--long 6000] [--links 1000,loopback] [--add FILE]

With `--add` an earlier result is continued. Links other than loopback need root. The last line is a JSON object:
`same_rule_idle` and `same_rule_loaded` (the share of runs that got the most frequent rule), `changes_per_hour_loaded`
(choices after the first), `auto_over_best` (time over that of the fastest comparable rule, on the worst link); and what
they are made from, by run or link: `idle`, `loaded`, `long` and `links`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _emulate import emulated_model
from _workers import Copy, is_quick
from network import Meeting, _wait, plain_step, sgd, variables

from paceline.observe.reports.read import read_run

RULES = (
    "bmuf(period=4)",
    "bmuf(period=4, overlap=4)",
    "bmuf(period=4, overlap=4, codec='bf16')",
    "bmuf(period=4, overlap=4, codec='int8')",
    "bmuf(period=16, overlap=16)",
    "bmuf(period=16, overlap=16, codec='int8')",
)
WORKERS, DELAY_MS = 2, 0.1
SIZES = {"parameters": 2_500_000, "compute_ms": 50.0, "steps": 48, "settle": 64, "timeout": 60.0}
"""Computing is an emulated accelerator's, for a step; at least so many steps are timed, of auto after so many."""
AUTO = "auto"
LOOPBACK = "loopback"
HERE = SimpleNamespace(prefix=lambda host: [], environment=lambda host: {}, address=lambda host: "127.0.0.1")


# -- a worker ---------------------------------------------------------------------------------------------------------


def measured(options: argparse.Namespace, meeting: Meeting, rule: str) -> dict[str, Any]:
    """One training: seconds of a step after the start, of the start, and what `auto` chose."""
    import paceline

    compute_s = options.compute_ms / 1e3
    torch.manual_seed(0)
    model = emulated_model(options.parameters, 16, compute_s / 3, 2 * compute_s / 3)
    optimizer = sgd(model)
    run = paceline.attach(model, optimizer, rule, timeout_s=options.timeout)
    step, first = plain_step(model, optimizer), options.settle if rule == AUTO else max(4, run.rule.schedule.period)
    meeting.together()
    began = perf_counter()
    for _ in range(first):
        step()
    settled = perf_counter()
    period = run.rule.schedule.period
    steps = -(-options.steps // period) * period
    meeting.together()
    timed = perf_counter()
    for _ in range(steps):
        step()
    step_s = meeting.longest((perf_counter() - timed) / steps)
    meeting.together()
    start_s = meeting.longest(settled - began) - first * step_s
    meeting.together()
    chose = f"{run.rule.text()}, period {run.rule.schedule.period}"
    run.close()
    return {"step_s": step_s, "start_s": start_s, "period": period, "chose": chose}


def worker(options: argparse.Namespace) -> None:
    """One rank on one link."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    meeting = Meeting(rank, size, os.environ["MASTER_ADDR"], options.timeout)
    dist.init_process_group("gloo")
    rows: dict[str, list[Any]] = {}
    for number in range(options.rounds):
        rules = [AUTO, *options.rules] if number % 2 == 0 else [*options.rules, AUTO]  # neither is always first
        for rule in rules:
            rows.setdefault(rule, []).append(measured(options, meeting, rule))
    if rank == 0:
        Path(options.answer).write_text(json.dumps(rows))
    meeting.leave()
    os._exit(0)


# -- the links --------------------------------------------------------------------------------------------------------


def on_link(link: str, options: argparse.Namespace) -> dict[str, list[Any]]:
    """All rules on one link: rule -> what each round found."""
    from devtools.emulation import EmulatedNetwork

    shaped: Any = nullcontext(HERE) if link == LOOPBACK else EmulatedNetwork(WORKERS, float(link), DELAY_MS)
    with shaped as network, tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer"
        errors = [Path(folder) / f"err.{k}" for k in range(WORKERS)]
        processes = [_started(network, k, options, answer, errors[k]) for k in range(WORKERS)]
        try:
            _wait(processes, errors, 60 * options.timeout)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        found: dict[str, list[Any]] = json.loads(answer.read_text())
        return found


def _started(network: Any, host: int, options: argparse.Namespace, answer: Path, errors: Path) -> Any:
    given = json.dumps(vars(options) | {"answer": str(answer)})
    command = [*network.prefix(host), sys.executable, str(Path(__file__).resolve()), "--worker", given]
    with errors.open("wb") as sink:
        environment = variables(network, host, WORKERS)
        start = Copy if is_quick() else subprocess.Popen
        return start(command, env=environment, stdout=subprocess.DEVNULL, stderr=sink)


def judged(rows: dict[str, list[Any]]) -> dict[str, Any]:
    """The figures of one link."""
    step_s = {rule: statistics.median(one["step_s"] for one in found) for rule, found in rows.items()}
    auto, period = step_s.pop(AUTO), max(one["period"] for one in rows[AUTO])
    comparable = {rule: seconds for rule, seconds in step_s.items() if rows[rule][0]["period"] <= period} or step_s
    best = min(comparable, key=lambda rule: comparable[rule])
    return {
        "auto_over_best": round(auto / comparable[best], 4),
        "auto_over_all": round(auto / min(step_s.values()), 4),
        "chose": [one["chose"] for one in rows[AUTO]],
        "best": best,
        "start_s": round(statistics.median(one["start_s"] for one in rows[AUTO]), 2),
        "step_ms": {rule: [round(1e3 * one["step_s"], 2) for one in found] for rule, found in rows.items()},
    }


# -- runs of a program ------------------------------------------------------------------------------------------------


PROGRAM = """
import itertools, sys, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(0)
data = TensorDataset(torch.randn(51200, 256), torch.randint(10, (51200,)))
model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
optimizer, loader = torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(data, 64, shuffle=True)
left = int(sys.argv[1])
while left > 0:
    for x, y in itertools.islice(loader, left):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    left -= 400
"""
"""Two workers make 400 minibatches a pass each."""


def run(minibatches: int) -> dict[str, Any]:
    """One run: the rule, how often it was chosen again, the seconds from start to end."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text(PROGRAM, encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            "2",
            "--log",
            "log",
            "train.py",
            str(minibatches),
        ]
        began = perf_counter()
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
        log = read_run(Path(folder) / "log")
        again = sum(1 for change in log.tuned if change.why)
        return {"rule": log.rule, "again": again, "seconds": round(perf_counter() - began, 1), "why": log.why}


def beside_load(runs: list[int], load: int) -> list[dict[str, Any]]:
    """Runs beside `load` busy processes."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(load)]
    try:
        return [run(minibatches) for minibatches in runs]
    finally:
        for process in busy:
            process.kill()
            process.wait()


def same(runs: list[dict[str, Any]]) -> float:
    """The share of the most frequent rule."""
    return round(Counter(one["rule"] for one in runs).most_common(1)[0][1] / len(runs), 3) if runs else 0.0


# -- all of it --------------------------------------------------------------------------------------------------------


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    sizes = {"idle": 20, "loaded": 20, "long": 6000, "minibatches": 40}  # runs, and minibatches of the long and others
    for name, size in sizes.items():
        add(f"--{name}", type=int, default=size)
    add("--links", default="", help="Mbit/s of each direction, comma between")
    add("--add", default="", help="an earlier result")
    add("--rounds", type=int, default=2, help="of each link")
    add("--rule", dest="rules", action="append", help="in place of the rules that are tried")
    add("--worker", default="", help=argparse.SUPPRESS)
    small = {"parameters": 200_000, "compute_ms": 4.0, "steps": 8, "settle": 48}
    runs = {"idle": 1, "loaded": 0, "long": 0, "minibatches": 14, "links": LOOPBACK, "add": "", "rounds": 1}
    options = _quick.parse(parser, rules=["sync", "bmuf(period=4)"], **runs)
    options.rules = options.rules or list(RULES)
    vars(options).update(SIZES | (small if options.quick else {}))
    return options


def main() -> None:
    """All parts that are asked for."""
    options = parse()
    if options.worker:
        worker(argparse.Namespace(**json.loads(options.worker)))
    parts: dict[str, Any] = {"idle": [], "loaded": [], "long": [], "links": {}}
    if options.add:
        parts = {name: json.loads(Path(options.add).read_text(encoding="utf-8"))[name] for name in parts}
    parts["idle"] += [run(options.minibatches) for _ in range(options.idle)]
    parts["loaded"] += beside_load([options.minibatches] * options.loaded, 4)
    parts["long"] += beside_load([options.long] if options.long else [], 4)
    for link in options.links.split(",") if options.links else ():
        parts["links"][link] = judged(on_link(link, options))
    hours = sum(one["seconds"] for one in parts["long"]) / 3600
    figures = {
        "same_rule_idle": same(parts["idle"]),
        "same_rule_loaded": same(parts["loaded"]),
        "changes_per_hour_loaded": round(sum(one["again"] for one in parts["long"]) / hours, 2) if hours else 0.0,
        "auto_over_best": max([row["auto_over_best"] for row in parts["links"].values()], default=0.0),
    }
    print(json.dumps(figures | parts))


if __name__ == "__main__":
    main()
