# SPDX-License-Identifier: Apache-2.0
"""LightRNN against a full and an adaptive softmax: perplexity, size and speed on real text.

The text is that of docstrings and comments of Python's library and of the packages beside it. All three models have
the same hidden size, read the same words in the same order in the same rounds, and take the same number of steps; the
LightRNN allocates its words anew between rounds, and once more is trained without that (`fixed`, its first table).

    python benchmarks/seeds/lightrnn.py [--words 2000000] [--dimension 128] [--seeds 3] [--jobs 2] [--out out/lightrnn]

With larger hidden sizes the models want lower rates (`--rate`), and the full softmax takes hours; `--bfloat16 full` has
its products computed in bfloat16, weights and perplexity stay float32.

Finished trainings in `--out` are kept, so that it goes on where it was stopped. The last line is a JSON object:
`perplexity` of each model (mean over seeds), `ratio` of LightRNN's to the full softmax's (mean, each), `parameters`
(how many times fewer at input and output), `speed` (tokens per second over the full softmax's, in one run).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import _trainings
import _words
import torch

from paceline_lightrnn import Course, Data, Settings, Shape, Source, build, parameter_bytes, prepare, train

MODELS = {"lightrnn": 0.01, "fixed": 0.01, "adaptive": 0.01, "full": 0.01}
"""Names, and the highest learning rate of each."""
DEAREST_FIRST = ("full", "adaptive", "lightrnn", "fixed")
WINDOWS = 10
"""Of each model in turn, in one round of the comparison of speed."""


def settings_of(args: argparse.Namespace, model: str, seed: int) -> Settings:
    """What is trained, and how."""
    output = model if model in ("full", "adaptive") else "lightrnn"
    rate = MODELS[model] if args.rate is None else args.rate
    course = Course(args.rounds, args.short, batch=32, window=20, rate=rate, seed=seed, save_every=10**6)
    if model == "fixed":
        course = replace(course, costs="none")
    return Settings(Shape(args.dimension, output=output), course, source_of(args))


def source_of(args: argparse.Namespace) -> Source:
    return Source((str(args.out / "text.txt"),), held_back=0.05, min_count=2)


def data_of(args: argparse.Namespace) -> Data:
    """The text, made once."""
    _words.once(args.out / "text.txt", _words.write, args.words)
    return prepare(source_of(args), args.out / "data")


def one(args: argparse.Namespace, model: str, seed: int) -> None:
    """Train one model, and leave what came out."""
    torch.set_num_threads(1)  # other trainings have the other cores
    settings, data = settings_of(args, model, seed), data_of(args)
    network = build(settings.shape, data.vocabulary, seed)
    if model in args.bfloat16:
        network.loss = in_bfloat16(network.loss)  # type: ignore[method-assign]
    history = train(network, data, settings.course, args.out / f"{model}-{seed}")
    row = {"model": model, "seed": seed, "history": history, "perplexity": history[-1]["perplexity"]}
    _trainings.leave(args.out, (model, seed), row)
    print(f"{model}, seed {seed}: perplexity {row['perplexity']:.2f}", flush=True)


def in_bfloat16(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss whose products, and those of its gradient, are computed in bfloat16."""

    def low(*args: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(*args)

    return low


def all_of_them(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train what is not there yet, `--jobs` at a time."""
    wanted = [(model, seed) for model in DEAREST_FIRST if model in args.only for seed in range(args.seeds)]
    data_of(args)
    return _trainings.rows_of(args.out, wanted, args.jobs)


def speeds(args: argparse.Namespace, repeats: int = 5) -> dict[str, float]:
    """Tokens per second of each model's training, a few steps of each in turn; medians."""
    data = data_of(args)
    batch, window = 32, 20
    words = torch.from_numpy(data.train.ids[: batch * window * WINDOWS].astype("int64")).view(batch, -1)
    networks = {
        name: build(settings_of(args, name, 0).shape, data.vocabulary) for name in ("lightrnn", "full", "adaptive")
    }
    optimizers = {name: torch.optim.Adam(network.parameters(), fused=True) for name, network in networks.items()}
    found: dict[str, list[float]] = {name: [] for name in networks}
    for _ in range(repeats + 1):
        for name, network in networks.items():
            began, state = time.perf_counter(), network.begin(batch)
            for some in torch.split(words, window, 1):
                loss, state = network.loss(some, state.detach())
                optimizers[name].zero_grad()
                loss.backward()
                optimizers[name].step()
            found[name].append(words.numel() / (time.perf_counter() - began))
    return {name: statistics.median(rates[1:]) for name, rates in found.items()}


def summary(rows: list[dict[str, Any]], rates: dict[str, float], args: argparse.Namespace) -> dict[str, Any]:
    """The figures, for people on lines of their own and as one JSON object."""
    found = {model: [row["perplexity"] for row in rows if row["model"] == model] for model in args.only}
    for model, each in found.items():
        print(f"{model:10} perplexity {statistics.mean(each):8.2f}  {', '.join(f'{x:.2f}' for x in each)}")
    words = len(data_of(args).vocabulary)
    sizes = {name: parameter_bytes(words, args.dimension, output=name) for name in ("light", "full", "adaptive")}
    outer = {name: size.input + size.output for name, size in sizes.items()}
    ratios = [a / b for a, b in zip(found.get("lightrnn", []), found.get("full", []), strict=False)]
    return {
        "words": words,
        "perplexity": {model: round(statistics.mean(each), 3) for model, each in found.items()},
        "ratio": round(statistics.mean(ratios), 4) if ratios else None,
        "ratios": [round(x, 4) for x in ratios],
        "parameters": round(outer["full"] / outer["light"], 2),
        "bytes": {name: size.total for name, size in sizes.items()},
        "tokens_per_s": {name: round(rate, 1) for name, rate in rates.items()},
        "speed": round(rates["lightrnn"] / rates["full"], 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--words", type=int, default=2_000_000, help="of the text, about")
    parser.add_argument("--dimension", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--short", type=int, default=4)
    parser.add_argument("--rate", type=float, help="highest learning rate of all models instead of each one's own")
    parser.add_argument("--bfloat16", nargs="+", choices=MODELS, default=[], metavar="MODEL")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="trainings at a time")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--out", type=Path, default=Path("out/lightrnn"))
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "SEED"), help=argparse.SUPPRESS)
    args = _quick.parse(parser, words=20_000, dimension=16, seeds=1, short=1)
    if args.one:
        one(args, args.one[0], int(args.one[1]))
        return
    rows = all_of_them(args)
    print(json.dumps(summary(rows, speeds(args), args)))


if __name__ == "__main__":
    main()
