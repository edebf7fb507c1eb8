# SPDX-License-Identifier: Apache-2.0
"""BMUF-Adam on a line reader: what compensated moments and a smaller beta1 are worth, beside synchronous Adam.

The experiment of Chen, Ding and Huo (ICASSP 2020, tables 1 and 2) at the size of a small machine. Pictures of lines of
6 to 12 characters are read by a small network with CTC, trained by Adam. All trainings see the same minibatches in the
same order, and their rate follows the same curve over samples. First one worker tries the rates of `--rates`; the one
that reads the tuning lines best (with the first seed) is everybody's. Synchronous Adam, whose minibatch is N times
larger, has it as it is, times root N, and times N; block methods have it as it is, or `--block-rate`, whatever N is.
The table is made on other lines, of modules that no training saw.

    python benchmarks/quality/lines.py [--workers 1 8 32 64] [--period 8] [--minibatches 98304] [--seeds 3] [--jobs 2]
        [--out out/lines] [--plot FILE] [--quick] [--exponents P ...]

Workers under block rules are stacked (`paceline_plugins.forecast.simulate_stacked`); synchronous ones are one with a
minibatch N times larger, whose gradient is the mean of theirs. Each training is a process of its own with one thread,
kept under `--out`, so the command goes on where it was stopped. `--plot out.png` writes the figure, and lines with
their reading to out_lines.png. `--check` only compares stacked with virtual workers. The last line is a JSON object:
`rate`, `tuning` (error by rate), and `cells`: method, workers, mean `error`, `least`, `most`, `over_serial` (error over
that of one worker with the same beta1, less 1), `diverged` (of the seeds), `minibatch_ms`. With `--exponents`
there is no table, but ours with gains of N^p at beta1 .5 for each p and N, the best gain of each N, and the law (as
`blocks.py gain` has it).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from _lines_plots import write_lines, write_table
from _lines_training import (
    BLOCKS,
    FINAL_LINES,
    METHODS,
    SERIAL,
    SMALL_SERIAL,
    SYNC,
    Size,
    Training,
    check,
    held_out,
    train,
    with_gain,
)
from _reading import CHUNK, Row, best_rate, cells_of, trained
from _reading_gains import gains_of, name_of, report
from _trainings import leave


def parse_arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--period", type=int, default=8, help="minibatches of a block")
    parser.add_argument("--minibatches", type=int, default=98_304, help=f"of all workers; a multiple of {CHUNK}")
    parser.add_argument("--batch", type=int, default=4, help="lines in a minibatch")
    parser.add_argument("--rates", type=float, nargs="+", default=[2e-3, 4e-3, 8e-3], help="that one worker tries")
    parser.add_argument(
        "--block-rate", type=float, help="that of methods with blocks at every N; default: one worker's"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    parser.add_argument("--exponents", type=float, nargs="+", help="study gains of N^p instead of making the table")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=Path("out/lines"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small table with one seed, to see that all works")
    parser.add_argument("--check", action="store_true", help="compare stacked with virtual workers, and stop")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.workers, options.minibatches, options.rates, options.seeds = [1, 8], 128, [2e-3], 1
        options.exponents = options.exponents and [0.5, 0.7]
    bad = [number for number in options.workers if number < 1 or CHUNK % number]
    if bad or options.minibatches < 1 or options.minibatches % CHUNK:
        parser.error(f"workers must divide {CHUNK} (got {bad}), and minibatches be a multiple of it")
    return options


def trainings_of(options: argparse.Namespace, rate: float) -> list[Training]:
    """Those of the table, where one worker has this rate."""
    in_blocks = options.block_rate or rate
    alone = [Training(method, 1, rate) for method in (SERIAL, SMALL_SERIAL)]
    several = [number for number in options.workers if number > 1]
    if options.exponents:
        tried = [(number, gain) for number in several for gain in gains_of(number, options.exponents)]
        return [Training(with_gain(name_of(gain), gain), number, in_blocks) for number, gain in tried]
    together = [Training(method, number, rate) for number in several for method in SYNC]
    together += [Training(method, number, in_blocks) for number in several for method in BLOCKS]
    wanted = options.methods or list(METHODS)
    return [training for training in alone + together if training.method.name in wanted]


def one(options: argparse.Namespace, size: Size) -> None:
    """Make one training, as its process was told."""
    name, seed = options.one[0], int(options.one[1])
    every = [training for rate in options.rates for training in trainings_of(options, rate)]
    every += [Training(method, 1, rate) for method in (SERIAL, SMALL_SERIAL) for rate in options.rates]
    training = next(training for training in every if training.name == name)
    leave(options.folder, (name, seed), train(training, size, seed, options.out))


def _compare(cells: list[Row]) -> None:
    """Say how each stands beside one worker with the same beta1."""
    alone = {METHODS[cell["method"]].beta1: cell["error"] for cell in cells if cell["workers"] == 1}
    for cell in cells:
        serial = alone.get(METHODS[cell["method"]].beta1)
        cell["over_serial"] = cell["error"] / serial - 1 if serial else None


def show(cells: Sequence[Row], workers: Sequence[int]) -> None:
    """Print the table: mean error rate in per cent, with the least and the most of the seeds."""
    print(f"{'character error rate, %':34}" + "".join(f"{f'N = {number}':>22}" for number in workers))
    for method in dict.fromkeys(cell["method"] for cell in cells):
        mine = {cell["workers"]: cell for cell in cells if cell["method"] == method}
        print(f"{method:34}" + "".join(f"{_text(mine.get(number)):>22}" for number in workers))
    for number in workers:
        for kind, stacked in (("one large minibatch", False), ("stacked", True)):
            took = [cell["minibatch_ms"] for cell in cells if cell["workers"] == number and _stacks(cell) == stacked]
            known = [ms for ms in took if ms]
            if known:
                print(f"N = {number}, {kind}: {1e3 / mean(known):.0f} minibatches a second of processor time")


def _stacks(cell: Row) -> bool:
    return METHODS[cell["method"]].rule != "sync"


def _text(cell: Row | None) -> str:
    if cell is None:
        return ""
    if cell["diverged"]:
        return f"{100 * cell['error']:.1f} ({cell['diverged']} diverged)"
    return f"{100 * cell['error']:.2f} ({100 * cell['least']:.2f}-{100 * cell['most']:.2f})"


def main() -> None:
    """Make the table."""
    options = parse_arguments()
    torch.set_num_threads(1)
    size = Size(options.minibatches, options.batch, options.period)
    options.folder = options.out / f"{size.minibatches}x{size.batch}-period-{size.period}"
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        one(options, size)
        return
    size.training(options.out)  # once, before the trainings look for them
    held_out(options.out)
    if options.check:
        print(json.dumps({"difference": check(size, options.out)}))
        return
    alone = [Training(SERIAL, 1, rate).name for rate in options.rates]
    tuned = trained(options.folder, alone, 1, options.jobs)
    rate, tuning = best_rate(tuned)
    names = [training.name for training in trainings_of(options, rate)]
    rows = trained(options.folder, names, options.seeds, options.jobs)
    if options.exponents:
        base = [Training(SMALL_SERIAL, 1, rate).name]
        alone_rows = trained(options.folder, base, options.seeds, options.jobs)
        report(rows, alone_rows, size.minibatches, options.plot)
        return
    cells = cells_of(rows)
    _compare(cells)
    print(f"{size.minibatches} minibatches of {size.batch} lines, period {size.period}, {FINAL_LINES} lines judged")
    show(cells, sorted({cell["workers"] for cell in cells}))
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        write_table(cells, rows, options.plot)
        if any(row["method"] == SERIAL.name and "read" in row for row in rows):
            write_lines(rows, options.out, options.plot.with_stem(f"{options.plot.stem}_lines"))
    figures = {"rate": rate, "tuning": {f"{key:g}": error for key, error in tuning.items()}}
    print(json.dumps({**figures, "minibatches": size.minibatches, "cells": cells}))


if __name__ == "__main__":
    main()
