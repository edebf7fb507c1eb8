# SPDX-License-Identifier: Apache-2.0
"""A CNN on pictures with asynchronous workers: how much of what `asgd` loses does delay compensation win back?

    python benchmarks/seeds/delay_compensation.py [--rows table ..] [--seeds 0] [--quick] [--out DIR]

Letters on photographs (`_letters.py`), plain SGD whose rate falls by steps, virtual workers on paceline's simulated
clock; rows of one seed are trained in one stack (`_stale_stack.py`). Finished trainings are kept in DIR (default
`out/delay_compensation`) and not made again. The last line is a JSON object: `trainings`, each with its held-out `loss`
(nats) and `error` (%); `cells`, their means over the seeds, with `over_one_worker` (of the loss, a share) and
`gap_closed` (of what ASGD loses at the same rate); and the `command`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _letters import LETTERS, cut, letters
from _stale_rows import ONCE, ROWS
from _stale_stack import Row, Stack, held_out
from torch import Tensor

TRAINING, HELD_OUT = 20_000, 6_000
STACKED = 14
"""Rows that are trained at once: more are not faster."""

ABOUT = ("minibatches", "method", "workers", "rate", "rule")
Data = tuple[Tensor, Tensor]
Line = dict[str, Any]


def pictures(quick: bool) -> tuple[Data, Data]:
    """For training, and held out; the held-out ones are cut once."""
    training, (whole, classes) = letters(320 if quick else TRAINING, False), letters(500 if quick else HELD_OUT, True)
    return training, (cut(whole, torch.Generator().manual_seed(5)), classes)


def train(rows: Sequence[Row], data: tuple[Data, Data]) -> list[Line]:
    """A stack from beginning to end: each row with its result."""
    stack, begun = Stack(rows, data[0], len(LETTERS)), time.process_time()
    for _ in range(rows[0].minibatches):
        stack.step()
    cpu_s = round((time.process_time() - begun) / len(rows), 1)
    found = zip(rows, *held_out(stack.values, data[1], len(LETTERS)), strict=True)
    return [asdict(row) | result(loss, error) | {"cpu_s": cpu_s} for row, loss, error in found]


def result(loss: float, error: float) -> Line:
    """None where a training diverged."""
    fine = math.isfinite(loss)
    return {"loss": round(loss, 5) if fine else None, "error": round(error, 3) if fine else None}


def stacks(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Rows that can be trained at once."""
    for _, each in groupby(sorted(rows, key=together), key=together):
        same = list(each)
        for begin in range(0, len(same), STACKED):
            yield same[begin : begin + STACKED]


def together(row: Row) -> tuple[int, int]:
    """What rows of one stack have in common."""
    return row.seed, -row.minibatches


def trainings(wanted: Sequence[Row], data: tuple[Data, Data], path: Path) -> list[Line]:
    """Those of `wanted`; what is in the file is not trained again."""
    done = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    missing = [row for row in wanted if not any(asdict(row).items() <= line.items() for line in done)]
    for rows in stacks(missing):
        made = train(rows, data)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in made)
        for line in made:
            print(json.dumps(line), flush=True)
        done += made
    return [next(line for line in done if asdict(row).items() <= line.items()) for row in wanted]


def mean(lines: Sequence[Line], key: str) -> float | None:
    """None where one of them diverged."""
    found = [line[key] for line in lines]
    return None if None in found else round(fmean(found), 5)


def about(line: Line) -> tuple[Any, ...]:
    """What a cell is the mean of, besides the seed."""
    return tuple(line[key] for key in ABOUT)


def cells(lines: Sequence[Line]) -> list[Line]:
    """Means over the seeds."""
    found = []
    for name, each in groupby(sorted(lines, key=about), key=about):
        own = list(each)
        cell = dict(zip(ABOUT, name, strict=True)) | {"seeds": sorted(line["seed"] for line in own)}
        cell |= {"loss": mean(own, "loss"), "error": mean(own, "error")}
        alone, plain = (like(lines, cell, *which) for which in (("one worker", 1), ("asgd", cell["workers"])))
        known = cell["loss"] is not None and alone is not None
        cell["over_one_worker"] = round(cell["loss"] / alone - 1, 4) if known and alone else None
        closed = known and plain is not None and alone is not None and plain != alone
        cell["gap_closed"] = round((plain - cell["loss"]) / (plain - alone), 4) if closed else None
        found.append(cell)
    return found


def like(lines: Sequence[Line], cell: Line, method: str, workers: int) -> float | None:
    """The mean loss of another method at a cell's rate, with the same seeds; None where one is missing."""
    wanted = {"method": method, "workers": workers, "rate": cell["rate"], "minibatches": cell["minibatches"]}
    found = [line for line in lines if wanted.items() <= line.items() and line["seed"] in cell["seeds"]]
    return mean(found, "loss") if len(found) == len(cell["seeds"]) else None


def main() -> None:
    """Train what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="*", choices=list(ROWS), default=["table"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, default=Path("out/delay_compensation"))
    args = _quick.parse(parser, seeds=[0], out=Path("out/delay_compensation/quick"))
    torch.set_num_threads(1)
    wanted = [
        row for name in args.rows for seed in args.seeds[: 1 if name in ONCE else None] for row in ROWS[name](seed)
    ]
    wanted = list(dict.fromkeys(replace(row, minibatches=16) if args.quick else row for row in wanted))
    data = pictures(args.quick)
    args.out.mkdir(parents=True, exist_ok=True)
    made = trainings(wanted, data, args.out / "trainings.jsonl")
    print(json.dumps({"trainings": made, "cells": cells(made), "command": " ".join(sys.argv)}))


if __name__ == "__main__":
    main()
