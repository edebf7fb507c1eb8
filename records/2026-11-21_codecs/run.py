# SPDX-License-Identifier: Apache-2.0
"""Train the demo's model with 8 virtual workers under every codec; one line of results.jsonl for each training.

What is there already is not made again, so a stop loses nothing::

    python run.py              # seed 0
    python run.py --seeds 1 2 --main
    python run.py --only gradient "sync()" "one_bit(warmup=100)" --lr 12 --minibatches 6400
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rows import ROWS, WORKERS, Row
from torch.optim.lr_scheduler import LambdaLR

import paceline

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "examples" / "char_lm"))

from model import CharLM, validation_loss  # noqa: E402
from train import LARGEST_GRADIENT, learning_rate, make_loader  # noqa: E402

from data import Corpus, load_corpus  # noqa: E402

RESULTS = HERE / "results.jsonl"
FEW = 2  # workers of the quick form


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Every codec on the demo's task.")
    parser.add_argument("--minibatches", type=int, default=3200, help="of all workers together")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--only", nargs="+", metavar="WORD", help="a family and rules of it")
    parser.add_argument("--lr", type=float, help="instead of the family's own")
    parser.add_argument("--main", action="store_true", help="only dense and what has feedback")
    parser.add_argument("--quick", action="store_true", help="one rule of each family for a moment, kept apart")
    parser.add_argument("--until", help="start no training after this time of day, as HH:MM")
    return parser.parse_args()


def train(line: dict[str, Any], corpus: Corpus) -> tuple[CharLM, int] | None:
    """The body of one worker: the loop of examples/char_lm/train.py, with the optimizer of the family."""
    torch.manual_seed(line["seed"])
    model = CharLM()
    optimizer = getattr(torch.optim, line["optimizer"])(model.parameters(), lr=line["lr"])
    loader = make_loader(corpus, argparse.Namespace(minibatches=line["minibatches"], batch=16, length=16))
    run = paceline.attach(model, optimizer, line["rule"], seed=line["seed"])
    share = run.share(loader)
    scheduler = LambdaLR(optimizer, lambda step: learning_rate(step / len(share)))
    with run:
        for inputs, targets in share:
            optimizer.zero_grad()
            model.loss(inputs, targets).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            scheduler.step()
    return (run.model_for_export(), run.bytes_sent) if run.world.rank == 0 else None


def one_training(line: dict[str, Any], corpus: Corpus, workers: int = WORKERS) -> dict[str, Any]:
    """`line` with what came of it."""
    started, cpu = time.perf_counter(), time.process_time()
    try:
        result = paceline.simulate(lambda: train(line, corpus), workers)[0]
        assert result is not None
        line = line | {"loss": validation_loss(result[0], corpus.validation), "bytes": result[1]}
    except Exception as error:  # a training that fails is a result, too
        line = line | {"error": f"{type(error).__name__}: {error}"}
    return line | {"wall_s": round(time.perf_counter() - started, 1), "cpu_s": round(time.process_time() - cpu, 1)}


def read() -> list[dict[str, Any]]:
    """All lines there are."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def wanted(args: argparse.Namespace) -> list[Row]:
    if args.only:
        return [Row(args.only[0], rule, None, rule) for rule in args.only[1:]]
    return [row for row in ROWS if row.feedback is not False or not args.main]


def quick(corpus: Corpus) -> None:
    """Every rule with feedback for a moment; one that fails ends it."""
    corpus = replace(corpus, validation=corpus.validation[:2_000])
    with (HERE / "quick" / "results.jsonl").open("w") as file:
        for row in ROWS:
            if row.feedback is False:
                continue
            line = {"rule": row.rule, "optimizer": row.optimizer, "lr": row.lr, "seed": 0, "minibatches": 8 * FEW}
            made = one_training(line, corpus, FEW)
            file.write(json.dumps(made) + "\n")
            print(json.dumps(made), flush=True)
            if "error" in made:
                raise SystemExit(f"{row.rule} failed: {made['error']}")


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    corpus, results = load_corpus(), read()
    if args.quick:
        quick(corpus)
        return
    for seed in args.seeds:
        for row in wanted(args):
            line = {"rule": row.rule, "optimizer": row.optimizer, "lr": args.lr or row.lr}
            line |= {"seed": seed, "minibatches": args.minibatches}
            if any(line.items() <= result.items() for result in results):
                continue
            if args.until and time.strftime("%H:%M") >= args.until:
                return
            line = one_training(line, corpus)
            with RESULTS.open("a") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
            results.append(line)
            gc.collect()


if __name__ == "__main__":
    main()
