# SPDX-License-Identifier: Apache-2.0
"""A training tool in C++ at several numbers of workers: held-out error after equal samples, and speed-up.

`examples/c_tool` is trained by itself and on `--workers` workers under each rule with a period of 8, on the same frames
for as many epochs, at each of `--rates`; `--seeds` draws of the training data. Each is judged at its own best rate, by
the mean of the seeds. A machine with fewer cores than workers
cannot show their speed-up by the clock, so there are three figures for it:

    clock       time of the tool alone over that of two workers, from the end of the first epoch to the end of the last;
                one worker evaluates the held-out frames, while the other waits
    processor   processor seconds of two workers and their launcher over those of the tool alone, for the same training;
                without those of their start (a run without an epoch)
    speed_up    computed by the planner for 1 Gbit/s and a host for each worker, from one worker's processor time for a
                minibatch and the bytes of the rule; times vary by 10 %

    python benchmarks/speed/c_tool_workers.py [--frames 60000] [--epochs 12] [--seeds 3] [--workers 4 8] [--long 24]
        [--rates 0.05 0.1 0.2 0.5 1 2]

The last line is a JSON object: `error_alone` (percent, by rate, of each seed), `half` (error of the tool alone at its
best rate after half of the epochs over that at the end, by seed), `error` (by rule, workers and rate, of each seed),
`best` (the best rate, by rule and workers), `error_ratio` (of the means, each at its best rate, over alone),
`processor`, `clock`, `speed_up`, `step_ms`, and `block_bytes` that a worker has sent and should by the formula.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
from _c_tools import compile_example, frames

from paceline.observe import read_run
from paceline.rules.codec import Layout
from paceline.rules.recipes import rule_from_text
from paceline_c.build import Place
from paceline_plugins.forecast.planner import PRESETS, LogNormal, Workload, forecast

PERIOD, BATCH, HELD_OUT = 8, 32, 10_000
SHAPES = [(100, 64), (64,), (64, 64), (64,), (64, 24), (24,)]
"""Of the example's network."""
VARIATION = 0.1
TWO = ("clock", "processor")
"""What two workers take."""


@dataclass(frozen=True)
class Taken:
    """A training.

    Attributes:
        errors: of all epochs.
        clock_s: from the end of the first epoch to the end of the last.
        processor_s: of all its processes.
    """

    errors: list[float]
    clock_s: float
    processor_s: float


class Trainer:
    """Trains the example, by itself and on workers.

    Args:
        folder: of the programs and the data.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"

    def __call__(self, seed: int, epochs: int, workers: int = 0, rule: str = "", rate: float = 0.5) -> Taken:
        """Train; without workers the tool as it was."""
        names = ("train_paceline" if workers else "train", f"training{seed}", "heldout", "model")
        command = [*(str(self.folder / name) for name in names), str(epochs), f"{rate:g}"]
        start = [sys.executable, "-m", "paceline", "run", "--workers", str(workers), "--rule", rule, "--overwrite"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with subprocess.Popen(
            [*start, "--log", str(self.log), *command] if workers else command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        ) as process:
            assert process.stdout is not None
            lines = [(line, time.perf_counter()) for line in process.stdout if "held-out error" in line]
        if process.returncode or len(lines) != epochs:
            raise SystemExit(f"{command} on {workers} workers under {rule} ended with {process.returncode}")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        errors = [float(line.split()[-2]) for line, _ in lines]
        clock_s = lines[-1][1] - lines[0][1] if lines else 0.0
        return Taken(errors, clock_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    def block_bytes(self, rule: str, workers: int) -> dict[str, float]:
        """Bytes that a worker has sent in a block of the last training, and those of the formula."""
        sent = [worker.bytes / max(1, worker.exchanges[-1].block) for worker in read_run(self.log).workers]
        told = forecast(rule_from_text(rule), workload(1e-3), PRESETS["1gbe"], workers)
        return {"sent": round(mean(sent)), "formula": round(PERIOD * told.step_bytes)}


def workload(step_s: float) -> Workload:
    """One worker's work."""
    return Workload(LogNormal(step_s, VARIATION), Layout.of(SHAPES))


def text_of(method: str) -> str:
    """The rule."""
    return f"{method}(period={PERIOD})"


def two_workers(train: Trainer, options: argparse.Namespace) -> dict[str, dict[str, list[float]]]:
    """What two workers take beside the tool alone, by rule, seed by seed."""
    found: dict[str, dict[str, list[float]]] = {name: {rule: [] for rule in options.rules} for name in TWO}
    for method in options.rules:
        idle = range(0 if options.quick else options.seeds)
        idle_s = median([train(1, 0, 2, text_of(method)).processor_s for _ in idle] or [0.0])
        for seed in range(1, options.seeds + 1):
            alone, two = train(seed, options.long), train(seed, options.long, 2, text_of(method))
            found["clock"][method].append(round(alone.clock_s / two.clock_s, 3))
            found["processor"][method].append(round((two.processor_s - idle_s) / alone.processor_s, 3))
        print(f"{method:10} 2 workers: {', '.join(f'{name} {found[name][method]}' for name in TWO)}", flush=True)
    return found


def best_of(by_rate: dict[str, list[float]]) -> str:
    """The rate with the least mean error."""
    return min(by_rate, key=lambda rate: mean(by_rate[rate]))


def table(train: Trainer, options: argparse.Namespace) -> dict[str, Any]:
    """Errors of all trainings, and the planner's times."""
    seeds, rates = range(1, options.seeds + 1), [f"{rate:g}" for rate in options.rates]

    def tuned(workers: int = 0, rule: str = "") -> dict[str, list[Taken]]:
        return {rate: [train(seed, options.epochs, workers, rule, float(rate)) for seed in seeds] for rate in rates}

    def last(by_rate: dict[str, list[Taken]]) -> dict[str, list[float]]:
        return {rate: [one.errors[-1] for one in each] for rate, each in by_rate.items()}

    taken = tuned()
    alone = last(taken)
    least = best_of(alone)
    found: dict[str, Any] = {
        "error_alone": alone,
        "half": [round(one.errors[options.epochs // 2 - 1] / one.errors[-1], 4) for one in taken[least]],
        "best": {"alone": least, **{method: {} for method in options.rules}},
        **{name: {method: {} for method in options.rules} for name in ("error", "error_ratio", "speed_up")},
        "block_bytes": {},
    }
    every = [one.processor_s for each in taken.values() for one in each]
    step_s = mean(every) / (options.epochs * options.frames / BATCH)
    for method in options.rules:
        rule = text_of(method)
        for workers in options.workers:
            errors = last(tuned(workers, rule))
            best = found["best"][method][str(workers)] = best_of(errors)
            told = forecast(rule_from_text(rule), workload(step_s), PRESETS["1gbe"], workers)
            found["error"][method][str(workers)] = errors
            found["error_ratio"][method][str(workers)] = round(mean(errors[best]) / mean(alone[least]), 4)
            found["speed_up"][method][str(workers)] = round(told.speed_up, 2)
            print(f"{method:10} {workers} workers: {errors[best]} % at {best}, alone {alone[least]} %", flush=True)
        found["block_bytes"][method] = train.block_bytes(rule, options.workers[-1])
    return found | {"step_ms": round(1e3 * step_s, 3), "command": " ".join(sys.argv)}


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--frames", type=int, default=60_000, help="to train on")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, nargs="*", default=[4, 8], help="none: time two workers only")
    parser.add_argument("--rules", nargs="+", default=["averaging", "bmuf", "asgd"])
    parser.add_argument("--rates", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.5, 1.0, 2.0])
    parser.add_argument("--long", type=int, default=24, help="epochs of the trainings that are timed; 0 for none")
    quick = {"frames": 4000, "epochs": 2, "seeds": 1, "workers": [2], "rules": ["bmuf"], "rates": [0.5], "long": 2}
    options = _quick.parse(parser, **quick)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="paceline-c-tool-") as scratch:
        folder = Path(os.environ.get("C_TOOL", scratch))
        compile_example(Place(folder / "prefix"), folder)
        for seed in range(1, options.seeds + 1):
            frames(folder, f"training{seed}", options.frames, 10 * seed + 1)
        frames(folder, "heldout", HELD_OUT, 2)
        train = Trainer(folder)
        if options.quick:  # the same training once is enough
            Trainer.__call__ = functools.cache(Trainer.__call__)  # type: ignore[method-assign]
        found: dict[str, Any] = two_workers(train, options) if options.long else {}
        found |= table(train, options) if options.workers else {}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
