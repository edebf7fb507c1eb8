# SPDX-License-Identifier: Apache-2.0
"""LightRNN against adaptive and full softmax at equal memory and at equal processor time, on 185,000 different words.

The text is the identifiers and words of all Python sources of this environment. Every model trains for the same seconds
of one processor core (by the process's clock, without evaluation) and is scored on held-back files. In a name, `bytes`
is the hidden size at which a softmax takes no more bytes than LightRNN (with 4 bytes a word for its table), `speed` the
one at which it reads as many words a second: `adaptive-bytes-256` is as large as `light-256`. LightRNN's table is by
frequency; `learned-256`, where it is asked for, allocates the words anew after a third of its time, and the seconds of
that come on top.

    python benchmarks/seeds/lightrnn_equal.py [--words 20000000] [--seconds 60]
        [--only light-256 adaptive-bytes-256 ...]

Finished trainings in `--out` are kept, so that it goes on where it was stopped. The last line is a JSON object:
`vocabulary`, `text` (words), `seconds`, `speeds` (words per processor second of training by output and hidden size),
`models` (of each model `dimension`, `bytes`, `words` read, `perplexity` and its `curve`); LightRNN's perplexity over
that of the best softmax, by its hidden size: of those that take as many bytes (`equal_memory`), and of all, since all
have the same time (`equal_time`); `export` (LightRNN and a full softmax of its hidden size as programs of
torch.export that give the ten most probable next words, on one thread: `bytes`, `ms` a word, and `exact`, the share
of words after which 16 rows were enough).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import _trainings
import _words
import numpy as np
import torch
from _lightrnn_programs import measure
from torch import Tensor
from torch.utils.data import DataLoader

from paceline import UnsupportedError
from paceline_lightrnn import (
    Corpus,
    Data,
    DenseCosts,
    LightRNN,
    Passages,
    Shape,
    Source,
    WordRNN,
    build,
    parameter_bytes,
    prepare,
    reallocate,
    score,
)
from paceline_lightrnn.baseline import NARROWER
from paceline_lightrnn.rates import share_of_rate

BATCH, WINDOW, WINDOWS = 32, 20, 20
CLIP = 1.0
RATE, RATE_SIZE = 0.01, 128
"""Adam's highest rate up to this hidden size; above, it falls with the root."""
LEARN_UNTIL, WARM = 0.35, 0.15
"""Shares of the time: when words are allocated anew, and from when on costs are gathered for that."""
MARKS = (0.1, 0.2, 0.4, 0.7)
"""Of the time, where the curve has a point."""
CUTOFFS = (500, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
"""That an adaptive softmax may have, as many as its hidden size allows."""
CHUNKS = 20
"""Of the held-back files, which are scored side by side."""
SPEED_SIZES = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Hidden sizes of an adaptive softmax of which one is as fast as LightRNN."""
TABLE_BYTES = 4
"""A word, for its cell."""
MODELS = (
    "light-256",
    "adaptive-bytes-256",
    "adaptive-speed-256",
    "light-512",
    "adaptive-bytes-512",
    "adaptive-speed-512",
    "full-bytes-512",
    "light-128",
)
QUICK = ("light-64", "adaptive-bytes-64", "adaptive-speed-64", "learned-64")


@dataclass
class Clock:
    """Processor seconds of this process, without those spent in `stopped`."""

    began: float = field(default_factory=time.process_time)

    def __call__(self) -> float:
        return time.process_time() - self.began

    def stopped(self, work: Callable[[], Any]) -> Any:
        at = time.process_time()
        found = work()
        self.began += time.process_time() - at
        return found


# -- the text ----------------------------------------------------------------------------------------------------------


def data_of(args: argparse.Namespace) -> Data:
    """The text, made once."""
    path = args.out / "text.txt"
    _words.once(path, _words.write_code, args.words)
    source = Source((str(path),), held_back=0.01, tokens="space", min_count=args.min_count)
    return prepare(source, args.out / "data")


def held_out(data: Data, words: int) -> Corpus:
    """Chunks from all over the held-back files."""
    ids = data.validation.ids
    length, step = min(words, len(ids)) // CHUNKS, len(ids) // CHUNKS
    return Corpus(np.concatenate([ids[k * step : k * step + length] for k in range(CHUNKS)]))


def windows(data: Data, seed: int) -> Iterator[tuple[bool, Tensor]]:
    """Words [BATCH, WINDOW] without end, in passages drawn by the seed; and whether passages begin with them."""
    drawn = torch.Generator().manual_seed(seed)
    passages = Passages(data.train, WINDOW * WINDOWS, BATCH)
    while True:
        for rows in DataLoader(passages, BATCH, shuffle=True, generator=drawn):
            for number, words in enumerate(torch.split(rows, WINDOW, 1)):
                yield number == 0, words


# -- training ----------------------------------------------------------------------------------------------------------


def new_model(data: Data, output: str, dimension: int, seed: int) -> Any:
    if output == "adaptive":
        torch.manual_seed(seed)
        return WordRNN(len(data.vocabulary), dimension, output=cutoffs_of(data, dimension))
    return build(Shape(dimension, output=output, table="frequency"), data.vocabulary, seed)


def cutoffs_of(data: Data, dimension: int) -> tuple[int, ...]:
    """The cutoffs with which an adaptive softmax computes the fewest logits a word."""
    most = int(math.log(dimension, NARROWER) + 1e-9)
    shares = np.cumsum(data.vocabulary.counts) / data.vocabulary.counts.sum()
    words = len(shares)

    def logits(cutoffs: tuple[int, ...]) -> float:
        ends = [*cutoffs, words]
        tails = sum((shares[b - 1] - shares[a - 1]) * (b - a) for a, b in pairwise(ends))
        return float(cutoffs[0] + len(cutoffs) + tails)

    grid = [cut for cut in CUTOFFS if cut < words] or [words // 2]
    choices = [some for n in range(1, most + 1) for some in combinations(grid, n)]
    if not choices:
        raise UnsupportedError(f"an adaptive softmax has {NARROWER} numbers a vector at least, got {dimension}")
    return min(choices, key=logits)


class Trainer:
    """One model's training within its time.

    Args:
        data: the text.
        model: to be trained.
        seconds: of the processor.
        scored: words of the held-back files.
        seed: of the order.
    """

    def __init__(self, data: Data, model: Any, seconds: float, scored: int, seed: int) -> None:
        self.model, self.seconds, self.held = model, seconds, held_out(data, scored)
        self.highest = RATE * min(1.0, (RATE_SIZE / model.dimension) ** 0.5)
        self.optimizer = torch.optim.Adam(model.parameters(), lr=self.highest, fused=True)
        full = isinstance(model, WordRNN) and model.adaptive is None  # whose every point takes half a minute
        self.text, self.marks = windows(data, seed), [share * seconds for share in MARKS if not full]
        self.clock, self.words, self.seed = Clock(), 0, seed
        self.curve: list[tuple[float, int, float]] = []

    def go(self, learn: bool) -> dict[str, Any]:
        """Train; what came out."""
        row: dict[str, Any] = {}
        if learn:
            costs = DenseCosts(self.model.table.words, *self.model.table.shape)
            self.until(LEARN_UNTIL * self.seconds, costs)
            row["allocation"] = self.reallocate(costs)
        self.until(self.seconds)
        self.point()
        return {**row, "perplexity": self.curve[-1][2], "words": self.words, "curve": self.curve}

    def until(self, end: float, costs: DenseCosts | None = None) -> None:
        """Train until the clock stands at `end`, with one fall of the learning rate."""
        self.model.train()
        began, state = self.clock(), None
        for first, words in self.text:
            done = (self.clock() - began) / (end - began)
            if done >= 1:
                return
            for group in self.optimizer.param_groups:
                group["lr"] = self.highest * share_of_rate(done)
            state = self.model.begin(BATCH) if first or state is None else state.detach()
            warm = self.clock() > WARM * self.seconds
            loss, state = self.loss(words, state, costs if warm else None)
            self.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
            self.optimizer.step()
            self.words += int((words >= 0).sum())
            if self.marks and self.clock() >= self.marks[0]:
                self.point()

    def loss(self, words: Tensor, state: Any, costs: DenseCosts | None) -> tuple[Tensor, Any]:
        if costs is None:
            found: tuple[Tensor, Any] = self.model.loss(words, state)
            return found
        h_row, h_column, state = self.model.halves(words, state)
        costs.add(self.model, words, h_row.detach(), h_column.detach())
        log_probs = self.model.log_prob_of_halves(words, h_row, h_column)
        return -log_probs.sum() / (words >= 0).sum().clamp(min=1), state

    def point(self) -> None:
        """A point of the curve."""
        del self.marks[:1]
        found = self.clock.stopped(lambda: score(self.model, self.held))
        self.model.train()
        self.curve.append((round(self.clock(), 2), self.words, round(found.perplexity, 3)))
        print(f"  {self.clock():6.1f} s {self.words:10,} words: {found.perplexity:8.1f}", flush=True)

    def reallocate(self, costs: DenseCosts) -> dict[str, float]:
        began = time.process_time()
        found = self.clock.stopped(lambda: reallocate(costs.source(), self.model.table, seed=self.seed, sweeps=1))
        self.model.table = found.table
        seconds = round(time.process_time() - began, 2)
        print(f"  words allocated anew in {seconds} s", flush=True)
        return {"seconds": seconds, "cost_ratio": round(found.after / found.before, 4)}


# -- what is compared --------------------------------------------------------------------------------------------------


def bytes_of(data: Data, output: str, dimension: int) -> int:
    """Of the parameters, and of LightRNN's table."""
    words = len(data.vocabulary)
    if output == "lightrnn":
        return parameter_bytes(words, dimension).total + TABLE_BYTES * words
    how = cutoffs_of(data, dimension) if output == "adaptive" else output
    return parameter_bytes(words, dimension, output=how).total


def as_large(data: Data, output: str, light: int) -> int:
    """The largest hidden size with which a softmax takes no more bytes than a LightRNN."""
    found, most = 0, bytes_of(data, "lightrnn", light)
    for dimension in range(NARROWER if output == "adaptive" else 1, light):
        if bytes_of(data, output, dimension) > most:
            break
        found = dimension
    if not found:
        raise SystemExit(f"no {output} softmax is as small as LightRNN with {light} numbers a vector ({most} bytes)")
    return found


def resolve(args: argparse.Namespace, data: Data, name: str) -> tuple[str, int]:
    """Output and hidden size of a model."""
    kind, *how, size = name.split("-")
    if kind in ("light", "learned"):
        return "lightrnn", int(size)
    if how == ["bytes"]:
        return kind, as_large(data, kind, int(size))
    speeds, wanted = speeds_of(args, data, kind), speeds_of(args, data, "lightrnn")[size]
    return kind, int(min(speeds, key=lambda d: abs(speeds[d] / wanted - 1)))


def speeds_of(args: argparse.Namespace, data: Data, output: str) -> dict[str, float]:
    """Words per processor second of training by hidden size, measured once."""
    path = args.out / f"speeds-{output}.json"
    if not path.exists():
        sizes = {"lightrnn": args.sizes, "adaptive": args.speed_sizes, "full": args.full_sizes}[output]
        found = {str(d): speed(data, output, d, args.steps) for d in sizes}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return dict(json.loads(path.read_text(encoding="utf-8")))


def speed(data: Data, output: str, dimension: int, steps: int) -> float:
    """Words per processor second; the median of some steps."""
    trainer = Trainer(data, new_model(data, output, dimension, 0), 1.0, CHUNKS, 0)
    text, found, state = windows(data, 1), [], trainer.model.begin(BATCH)
    for _ in range(steps + 1):
        words, began = next(text)[1], time.process_time()
        loss, state = trainer.model.loss(words, state.detach())
        trainer.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), CLIP)
        trainer.optimizer.step()
        found.append(words.numel() / (time.process_time() - began))
    print(f"{output} {dimension}: {statistics.median(found[1:]):,.0f} words/s", flush=True)
    return round(statistics.median(found[1:]), 1)


def one(args: argparse.Namespace, data: Data, name: str, seed: int) -> None:
    """Train one model, and leave what came out."""
    output, dimension = resolve(args, data, name)
    print(f"{name}: {output} softmax, {dimension} numbers a vector", flush=True)
    model = new_model(data, output, dimension, seed)
    row = Trainer(data, model, args.seconds, args.scored, seed).go(name.startswith("learned"))
    size = bytes_of(data, output, dimension)
    _trainings.leave(
        args.out, (name, seed), {"model": name, "seed": seed, "dimension": dimension, "bytes": size, **row}
    )
    if name.startswith("light-"):
        model.save(args.out / name)


# -- the figures -------------------------------------------------------------------------------------------------------


def over_best(rows: dict[str, dict[str, Any]], light: str, kind: str) -> float | None:
    """LightRNN's perplexity over that of the best softmax of this kind."""
    softmaxes = (name for name in rows if not name.startswith(("light-", "learned-")))
    found = [rows[name]["perplexity"] for name in softmaxes if name.endswith(kind)]
    return round(rows[light]["perplexity"] / min(found), 4) if found else None


def summary(args: argparse.Namespace, data: Data, trained: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures, as one JSON object."""
    rows = {row["model"]: row for row in trained}
    for row in trained:
        print(
            f"{row['model']:20} d {row['dimension']:4} {row['bytes'] / 1e6:8.2f} MB {row['words']:10,} words "
            f"perplexity {row['perplexity']:8.1f}"
        )
    sizes = [name.split("-")[1] for name in rows if name.startswith("light-")]
    outputs = ("lightrnn", "adaptive", "full")
    exported = LightRNN.load(args.out / f"light-{sizes[0]}")
    text = torch.from_numpy(held_out(data, args.scored).ids[: args.program_words].astype(np.int64))
    return {
        "vocabulary": len(data.vocabulary),
        "text": len(data.train) + len(data.validation),
        "seconds": args.seconds,
        "speeds": {output: speeds_of(args, data, output) for output in outputs},
        "models": rows,
        "equal_memory": {size: over_best(rows, f"light-{size}", f"-bytes-{size}") for size in sizes},
        "equal_time": {size: over_best(rows, f"light-{size}", "") for size in sizes},
        "export": {"dimension": exported.dimension, **measure(exported, text, args.out)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=20_000_000, help="of the text, about")
    parser.add_argument("--min-count", type=int, default=4, help="rarer words are unknown ones")
    parser.add_argument("--seconds", type=float, default=60.0, help="of one core, for each model")
    parser.add_argument("--scored", type=int, default=30_000, help="held-back words")
    parser.add_argument("--steps", type=int, default=4, help="of which a speed is the median")
    parser.add_argument("--program-words", type=int, default=500, help="that the exported programs read")
    parser.add_argument("--sizes", type=int, nargs="+", default=[128, 256, 512], help="of LightRNN")
    parser.add_argument("--speed-sizes", type=int, nargs="+", default=list(SPEED_SIZES), help="of the adaptive softmax")
    parser.add_argument("--full-sizes", type=int, nargs="+", default=[1, 8], help="of the full softmax")
    parser.add_argument("--only", nargs="+", default=list(MODELS), metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--out", type=Path, default=Path("out/lightrnn_equal"))
    quick: dict[str, Any] = {"words": 6_000, "min_count": 1, "seconds": 0.2, "scored": 200, "program_words": 5}
    quick |= {"steps": 1, "sizes": [64], "speed_sizes": [4, 16], "full_sizes": [1], "only": list(QUICK)}
    args = _quick.parse(parser, **quick)
    torch.set_num_threads(1)
    data = data_of(args)
    trained = _trainings.rows_of(args.out, [(name, 0) for name in args.only], 1, partial(one, args, data))
    print(json.dumps(summary(args, data, trained)))


if __name__ == "__main__":
    main()
