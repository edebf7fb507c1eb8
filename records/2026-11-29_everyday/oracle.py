# SPDX-License-Identifier: Apache-2.0
"""What a search for the best settings of `auto` in one cell reaches, beside `auto` itself: how much of the gap is ours.

    python records/2026-11-29_everyday/oracle.py [--programs gpt,cnn,convnext] [--workers 8] [--keep FILE] [--quick]

Everyday programs (`benchmarks/quality/everyday.py`), unchanged, under `auto` with one setting of its synchronous steps
changed at a time, seed 0: the exponent of the rate, C (how soon more workers train together), the exponents by which
Adam's betas shorten. Those that win are then combined, with the seeds 0, 1 and 2. The last line is a JSON object:
`over_one`, of the mean losses over one machine's, less 1, by program: `auto` and `oracle`; `best`, by program; `losses`
(program, workers, settings, seed, loss). With --keep rows are taken from the file, and added to it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "quality"))

from everyday import LOSS, MINIBATCHES, PROGRAMS

CHANGES: dict[str, tuple[float, ...]] = {"exponent": (-0.2, 0.2), "C": (12,), "beta2": (0.5,), "beta1": (0.0,)}
"""Added to the exponent of the rate; in place of 3; in place of 1 and of 1/3."""
WITHOUT = {"cnn": ("beta1", "beta2")}  # of Adam
PATCHED = """
import json, os
from paceline.tuning import sync_scaling
changes = json.loads(os.environ["ORACLE"])
scaling, highest = sync_scaling.SyncScaling, sync_scaling.SyncScaling.highest
sync_scaling.CRITICAL = changes.get("C", sync_scaling.CRITICAL)
def of_rate(self, optimizer, together=None):
    k = self._workers if together is None else together
    return highest(self, optimizer, together) * k ** changes.get("exponent", 0.0)
def betas(self, optimizer, own, step):
    if not sync_scaling.is_adam(optimizer):
        return own
    k = self._workers / self.groups(step)
    return own[0] ** (k ** changes.get("beta1", 1 / 3)), own[1] ** (k ** changes.get("beta2", 1.0))
scaling.highest, scaling.betas = of_rate, betas
"""
"""A module that Python imports at its start."""


def train(program: str, workers: int, changes: dict[str, float] | None, seed: int, minibatches: int) -> float:
    """The held-out loss; None is one machine."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "sitecustomize.py").write_text(PATCHED)
        data = os.environ.get("EVERYDAY_DATA", "out/everyday/data")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "EVERYDAY_DATA": data}
        command = [sys.executable]
        if changes is not None:
            environment["ORACLE"] = json.dumps(changes)
            environment["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
            call = ["sim", "--quiet", "--workers", str(workers), "--rule", "auto", "--log", f"{folder}/log"]
            command = [*command, "-m", "paceline", *call]
        command = [*command, str(PROGRAMS / f"{program}.py"), str(seed), "1.0", str(minibatches)]
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if not (found := LOSS.findall(done.stdout)):
        raise SystemExit(f"{program} ended with {done.returncode}: {done.stderr[-2000:]}")
    return float(found[-1])


class Search:
    """Of the best settings; trains what it has not trained yet."""

    def __init__(self, workers: int, length: float, keep: Path | None) -> None:
        self._workers, self._length, self._keep = workers, length, keep
        self.rows: list[list[Any]] = []
        if keep is not None and keep.exists():
            self.rows = [json.loads(line) for line in keep.read_text().splitlines()]

    def loss(self, program: str, changes: dict[str, float] | None, seed: int) -> float:
        name = "one" if changes is None else json.dumps(changes, sort_keys=True)
        workers = 1 if changes is None else self._workers
        for row in self.rows:
            if row[:4] == [program, workers, name, seed]:
                return float(row[4])
        minibatches = int(self._length * MINIBATCHES[program])
        self.rows.append([program, workers, name, seed, train(program, workers, changes, seed, minibatches)])
        print(*self.rows[-1], flush=True)
        if self._keep is not None:
            with self._keep.open("a") as file:
                file.write(json.dumps(self.rows[-1]) + "\n")
        return float(self.rows[-1][4])

    def best(self, program: str) -> dict[str, float]:
        """The settings that win alone, together; or the best of them, where that is better."""
        before, won = self.loss(program, {}, 0), dict[float, dict[str, float]]()
        for name, values in CHANGES.items():
            if name not in WITHOUT.get(program, ()):
                tried = {self.loss(program, {name: value}, 0): {name: value} for value in values}
                won |= {loss: one for loss, one in [min(tried.items(), key=lambda pair: pair[0])] if loss < before}
        if not won:
            return {}
        together = {name: value for one in won.values() for name, value in one.items()}
        alone = min(won)
        return together if self.loss(program, together, 0) < alone else won[alone]

    def mean(self, program: str, changes: dict[str, float] | None, seeds: tuple[int, ...]) -> float:
        return statistics.fmean(self.loss(program, changes, seed) for seed in seeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", default="gpt,cnn,convnext")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    programs, seeds, length = options.programs.split(","), (0, 1, 2), 1.0
    if options.quick:
        programs, seeds, length, options.workers = ["cnn"], (0,), 0.03, 2
    search, best = Search(options.workers, length, options.keep), {}
    over: dict[str, dict[str, float]] = {"auto": {}, "oracle": {}}
    for program in programs:
        best[program] = search.best(program)
        for name, changes in (("auto", {}), ("oracle", best[program])):
            ratio = search.mean(program, changes, seeds) / search.mean(program, None, seeds)
            over[name][program] = round(ratio - 1, 4)
    print(json.dumps({"over_one": over, "best": best, "losses": search.rows}))


if __name__ == "__main__":
    main()
