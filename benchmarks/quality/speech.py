# SPDX-License-Identifier: Apache-2.0
"""Block methods, synchronous and asynchronous SGD on speech: a bidirectional LSTM with CTC spells what it hears.

Utterances of one to three words, spoken by espeak-ng in many voices, come as noisy filter banks; the error counts
letters, by edit distance. All trainings hear the same minibatches in the same order, and their rate follows the same
curve over samples: up over 5 % (the gradual warm-up of scaled rates), level, then down. First one worker tries the
rates of `--rates`; the one that reads the tuning utterances best (with the first seed) is everybody's, but for `sync,
rate times N`, and for methods with blocks where `--block-rate` gives theirs, whatever N is. The table is made on other
utterances, in voices, at speeds and pitches that no training heard together.

    python benchmarks/quality/speech.py [--workers 4 8 16] [--period 8] [--minibatches 8192] [--seeds 3] [--jobs 2]
        [--out out/speech] [--plot FILE] [--quick] [--exponents P ...]

It needs espeak-ng (`apt install espeak-ng`). Workers under block rules are stacked
(`paceline_plugins.forecast.simulate_stacked`), synchronous ones are one with an N times larger minibatch, asynchronous
ones are virtual (`paceline.simulate`) and equally fast. Each training is a process of its own with one thread, kept
under `--out`, so the command goes on where it was stopped. `--plot out.png` writes the figure, and utterances with
their reading to out_features.png. `--check` only compares stacked with virtual workers. The last line is a JSON object:
`rate`, `tuning` (error by rate), and `cells`: method, workers, mean `error`, `least`, `most`, `word_error`,
`over_serial` (error over that of one worker, less 1), `diverged` (of the seeds), `minibatch_ms`, and `speed_up` by
network, which the planner computes from one worker's `minibatch_ms` and the model's size (`_speech_speed.py` says what
it assumes). With `--exponents` there is no table, but ours with gains of N^p for each p and N, the best gain of each N,
and the law (as `blocks.py gain` has it)."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import torch
from _reading import CHUNK, Row, best_rate, cells_of, trained
from _reading_gains import gains_of, name_of, report
from _speech import seconds
from _speech_plots import write_features, write_table
from _speech_speed import NETWORKS, VARIATION, speed_ups
from _speech_training import (
    FINAL,
    METHODS,
    SERIAL,
    TOGETHER,
    TRAINING,
    Size,
    Training,
    check,
    held_out,
    train,
    with_gain,
)
from _trainings import leave

RATES = {"adam": [1e-3, 2e-3, 4e-3, 8e-3], "momentum": [0.02, 0.05, 0.1, 0.2], "sgd": [0.2, 0.5, 1.0, 2.0]}


def parse_arguments() -> argparse.Namespace:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--period", type=int, default=8, help="minibatches of a block")
    parser.add_argument("--minibatches", type=int, default=8_192, help=f"of all workers; a multiple of {CHUNK}")
    parser.add_argument("--batch", type=int, default=8, help="utterances in a minibatch")
    parser.add_argument("--utterances", type=int, default=TRAINING, help="to train on")
    parser.add_argument("--hidden", type=int, default=64, help="units of each direction")
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--optimizer", choices=list(RATES), default="adam", help="of each worker")
    parser.add_argument("--rates", type=float, nargs="+", help="that one worker tries")
    parser.add_argument(
        "--block-rate", type=float, help="that of methods with blocks at every N; default: one worker's"
    )
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), help="default: all")
    parser.add_argument("--exponents", type=float, nargs="+", help="study gains of N^p instead of making the table")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--out", type=Path, default=Path("out/speech"))
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--quick", action="store_true", help="a small table with one seed, to see that all works")
    parser.add_argument("--check", action="store_true", help="compare stacked with virtual workers, and stop")
    parser.add_argument("--one", nargs=2, metavar=("NAME", "SEED"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.rates = options.rates or RATES[options.optimizer]
    if options.quick:
        options.workers, options.minibatches, options.rates, options.seeds = [4], 64, options.rates[:1], 1
        options.utterances, options.hidden = 512, 16
        options.exponents = options.exponents and [0.5, 0.7]
    bad = [number for number in options.workers if number < 1 or CHUNK % number]
    if bad or options.minibatches < 1 or options.minibatches % CHUNK:
        parser.error(f"workers must divide {CHUNK} (got {bad}), and minibatches be a multiple of it")
    return options


def size_of(options: argparse.Namespace) -> Size:
    """How large the trainings are."""
    return Size(
        options.minibatches,
        options.batch,
        options.period,
        options.utterances,
        options.hidden,
        options.layers,
        options.optimizer,
    )


def trainings_of(options: argparse.Namespace, rate: float) -> list[Training]:
    """Those of the table, where one worker has this rate."""
    in_blocks = options.block_rate or rate
    several = [number for number in options.workers if number > 1]
    if options.exponents:
        tried = [(number, gain) for number in several for gain in gains_of(number, options.exponents)]
        return [Training(with_gain(name_of(gain), gain), number, in_blocks) for number, gain in tried]
    together = [
        Training(method, number, in_blocks if "period" in method.rule else rate)
        for number in several
        for method in TOGETHER
    ]
    wanted = options.methods or list(METHODS)
    return [training for training in (Training(SERIAL, 1, rate), *together) if training.method.name in wanted]


def one(options: argparse.Namespace, size: Size) -> None:
    """Make one training, as its process was told."""
    name, seed = options.one[0], int(options.one[1])
    every = [training for rate in options.rates for training in trainings_of(options, rate)]
    every += [Training(SERIAL, 1, rate) for rate in options.rates]
    training = next(training for training in every if training.name == name)
    leave(options.folder, (name, seed), train(training, size, seed, options.out))


def _compare(cells: list[Row], size: Size) -> None:
    """Say how each stands beside one worker, in error and in computed speed."""
    alone = next((cell for cell in cells if cell["workers"] == 1), None)
    for cell in cells:
        cell["over_serial"] = cell["error"] / alone["error"] - 1 if alone and alone["error"] else None
        known = alone["minibatch_ms"] if alone else None
        cell["speed_up"] = speed_ups(cell["method"], cell["workers"], size, known) if known else None


def show(cells: Sequence[Row]) -> None:
    """Print the table: mean letter error rate in per cent with the least and the most of the seeds, and what else."""
    heads = "".join(f"{head:>12}" for head in ("words", "over serial", *NETWORKS, "ms"))
    print(f"{'letter error rate, %':24}{'N':>4}{'mean (least-most)':>24}{heads}")
    for cell in cells:
        text = f"{100 * cell['error']:.2f} ({100 * cell['least']:.2f}-{100 * cell['most']:.2f})"
        text = f"{text}, {cell['diverged']} diverged" if cell["diverged"] else text
        over = "" if cell["over_serial"] is None else f"{100 * cell['over_serial']:+.1f} %"
        speeds = "".join(f"{cell['speed_up'][name]:>12.2f}" if cell["speed_up"] else " " * 12 for name in NETWORKS)
        took = f"{cell['minibatch_ms']:.2f}" if cell["minibatch_ms"] else ""
        words = f"{100 * cell['word_error']:.2f}"
        print(f"{cell['method']:24}{cell['workers']:>4}{text:>24}{words:>12}{over:>12}{speeds}{took:>12}")
    print(
        f"{' and '.join(NETWORKS)}: speed-up over one worker as the planner computes it, with one worker's ms a "
        f"minibatch, times that vary by {100 * VARIATION:g} %, one worker a host"
    )


def main() -> None:
    """Make the table."""
    options = parse_arguments()
    torch.set_num_threads(1)
    size = size_of(options)
    model = f"{size.hidden}x{size.layers}-{size.optimizer}-{size.utterances}"
    options.folder = options.out / f"{size.minibatches}x{size.batch}-period-{size.period}-{model}"
    options.folder.mkdir(parents=True, exist_ok=True)
    if options.one:
        one(options, size)
        return
    said = size.training(options.out)  # once, before the trainings look for them
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
        alone_rows = trained(options.folder, [Training(SERIAL, 1, rate).name], options.seeds, options.jobs)
        report(rows, alone_rows, size.minibatches, options.plot)
        return
    cells = cells_of(rows)
    _compare(cells, size)
    print(
        f"{size.minibatches} minibatches of {size.batch} utterances of {seconds(said):.2f} s, period {size.period}, "
        f"{FINAL} utterances judged"
    )
    show(cells)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        write_table(cells, rows, options.plot)
        if any(row["method"] == SERIAL.name and "read" in row for row in rows):
            write_features(rows, options.out, options.plot.with_stem(f"{options.plot.stem}_features"))
    figures = {"rate": rate, "tuning": {f"{key:g}": error for key, error in tuning.items()}}
    print(json.dumps({**figures, "minibatches": size.minibatches, "cells": cells}))


if __name__ == "__main__":
    main()
