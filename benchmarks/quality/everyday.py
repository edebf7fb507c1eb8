# SPDX-License-Identifier: Apache-2.0
"""The loss of everyday programs on N workers at equal samples, with nothing tuned, beside synchronous training tuned.

    python benchmarks/quality/everyday.py [--out FOLDER] [--workers 8,32] [--seeds 0,1,2] [--programs gpt,cnn]
        [--lengths 1,1.5] [--quick]

The programs of `_everyday` run unchanged, by zero lines, on virtual workers; each has its author's schedule, and a rate
that was tuned for one machine. Rows: one machine; `auto`; `sync` with the rate 1, root N and N times, of which the best
in the mean over the seeds counts as tuned. `auto` is trained with more minibatches as well, by the factors `--lengths`.
The last line is a JSON object: `workers`, by N
- `auto_over_one`, `auto_over_tuned_sync`: of the mean losses, less 1: each program's, their median and the worst;
- `speed_up_in_steps`: one machine's steps over those that are made one after another;
- `speed_up_to_one`: the same of the shortest of the lengths with which the mean loss is at most one machine's, 0 if
  none; exchanges take no time in either;
and `losses` (program, N, rule, factor of the rate, length, seed, loss).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick

from paceline.rules.schedule import Probe
from paceline.tuning.sync_scaling import SyncScaling

PROGRAMS = Path(__file__).resolve().parent / "_everyday"
MINIBATCHES = {"gpt": 4096, "cnn": 6250, "lstm": 4096, "recommender": 4096, "diffusion": 4000, "convnext": 5000}
LOSS = re.compile(r"held-out loss (\S+)")
Row = tuple[str, int, str, float, float, int]
"""Program, workers, rule, factor of the rate, factor of the minibatches, seed."""


def rows(options: argparse.Namespace) -> Iterator[Row]:
    """What is trained."""
    for seed in map(int, options.seeds.split(",")):
        for program in options.programs.split(","):
            yield program, 1, "", 1.0, 1.0, seed
            for workers in map(int, options.workers.split(",")):
                lengths = map(float, options.lengths.split(","))
                yield from ((program, workers, "auto", 1.0, length, seed) for length in lengths)
                rates = (1.0, round(workers**0.5, 3), float(workers))[: 1 if options.quick else 3]
                yield from ((program, workers, "sync", rate, 1.0, seed) for rate in rates)


def minibatches_of(options: argparse.Namespace, program: str, length: float = 1.0) -> int:
    """Of all workers."""
    return int(length * (options.minibatches or MINIBATCHES[program]))


def train(options: argparse.Namespace, row: Row) -> float:
    """The held-out loss, from the folder if it is there."""
    program, workers, rule, rate, length, seed = row
    minibatches = minibatches_of(options, program, length)
    kept = options.out / f"{program}-{minibatches}-{workers}-{rule}-{rate}-{seed}.json"
    if not kept.exists():
        log = options.out / f"log-{os.getpid()}-{kept.stem}"
        command = [sys.executable, "-m", "paceline", "sim", "--quiet", "--workers", str(workers), "--rule", rule]
        command = [*command, "--log", str(log)] if workers > 1 else [sys.executable]
        given = [
            str(PROGRAMS / f"{program}.py"),
            str(seed),
            str(rate),
            str(minibatches),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "EVERYDAY_DATA": str(options.out / "data")}
        done = subprocess.run([*command, *given], capture_output=True, text=True, env=environment)
        shutil.rmtree(log, ignore_errors=True)
        found = LOSS.search(done.stdout)
        if done.returncode or found is None:
            raise SystemExit(f"{row} failed: {done.stderr[-2000:]}")
        kept.write_text(json.dumps({"row": row, "loss": float(found[1])}) + "\n")
        print(*row, found[1], flush=True)
    return float(json.loads(kept.read_text())["loss"])


def summary(options: argparse.Namespace, losses: dict[Row, float]) -> dict[str, object]:
    """The figures by N."""

    def mean(program: str, workers: int, rule: str, rate: float, length: float = 1.0) -> float:
        wanted = program, workers, rule, rate, length
        return statistics.fmean(loss for row, loss in losses.items() if row[:5] == wanted)

    def speed_up(program: str, workers: int, length: float) -> float:
        scaling = SyncScaling(workers, began=Probe().steps + 1)
        each = minibatches_of(options, program, length) // workers
        return round(scaling.speed_up(each) / length, 2)

    def over(parts: dict[str, float]) -> dict[str, object]:
        rounded = {name: round(value, 4) for name, value in parts.items()}
        return {"median": round(statistics.median(parts.values()), 4), "worst": max(rounded.values()), **rounded}

    programs, found = options.programs.split(","), dict[str, object]()
    one = {program: mean(program, 1, "", 1.0) for program in programs}
    lengths = sorted(map(float, options.lengths.split(",")))

    def reaches(program: str, workers: int, length: float) -> bool:
        return mean(program, workers, "auto", 1.0, length) <= one[program]

    for workers in map(int, options.workers.split(",")):
        rates = {row[3] for row in losses if row[1:3] == (workers, "sync")}
        auto = {program: mean(program, workers, "auto", 1.0) for program in programs}
        tuned = {program: min(mean(program, workers, "sync", rate) for rate in rates) for program in programs}
        found[str(workers)] = {
            "auto_over_one": over({name: auto[name] / one[name] - 1 for name in programs}),
            "auto_over_tuned_sync": over({name: auto[name] / tuned[name] - 1 for name in programs}),
            "speed_up_in_steps": {name: speed_up(name, workers, 1.0) for name in programs},
            "speed_up_to_one": {
                name: next((speed_up(name, workers, k) for k in lengths if reaches(name, workers, k)), 0.0)
                for name in programs
            },
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/everyday"))
    parser.add_argument("--workers", default="8,32")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--programs", default=",".join(MINIBATCHES))
    parser.add_argument("--lengths", default="1,1.5", help="factors of the minibatches of auto")
    parser.add_argument("--minibatches", type=int, help="of all workers, in place of each program's")
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    quick = {"workers": "2", "seeds": "0", "programs": "lstm,recommender", "minibatches": 16, "lengths": "1"}
    options = _quick.parse(parser, **quick)
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = list(dict.fromkeys(rows(options)))
    with ThreadPoolExecutor(options.jobs) as pool:
        losses = dict(zip(wanted, pool.map(lambda row: train(options, row), wanted), strict=True))
    listed = [[*row, loss] for row, loss in losses.items()]
    print(json.dumps({"workers": summary(options, losses), "losses": listed}))


if __name__ == "__main__":
    main()
