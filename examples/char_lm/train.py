# SPDX-License-Identifier: Apache-2.0
"""Train a character model on the source of Python's standard library.

An ordinary program for one device, and the two lines of paceline (marked 1 and 2)::

    python train.py                                                   # one worker
    paceline run --workers 4 --rule "bmuf(period=8)" train.py         # four
    torchrun --nproc-per-node 4 train.py --rule "bmuf(period=8)"      # the same with torchrun

`--minibatches` counts those of all workers together, so each of them does its share and all of
these see the same amount of text.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from model import CONTEXT, CharLM, validation_loss
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, RandomSampler

import paceline
from data import Chunks, Corpus, NoText, keep_batch, load_corpus

LOG_EVERY = 20  # minibatches
LARGEST_GRADIENT = 0.5  # an LSTM's gradient explodes now and then; this cuts it off


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a character model.")
    parser.add_argument("--rule", help='such as "bmuf(period=8)"; default: that of `paceline run`')
    parser.add_argument("--minibatches", type=int, default=10_000, help="of all workers together")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a minibatch")
    parser.add_argument("--length", type=int, default=16, help="characters of a sequence")
    parser.add_argument("--lr", type=float, default=8.0, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--text", type=Path, help="folder of .py files; default: Python's library")
    parser.add_argument("--log", type=Path, help="directory for the event log")
    parser.add_argument("--result", type=Path, help="JSON file for the result")
    parser.add_argument("--export", type=Path, help="file for the trained model's weights")
    return parser.parse_args()


def learning_rate(share_done: float) -> float:
    """Share of the highest rate: up over the first 2 %, level to 40 %, then down to 1 %."""
    if share_done < 0.4:
        return min(1.0, (share_done + 0.001) / 0.02)
    return 0.01 + 0.99 * (1.0 - share_done) / 0.6


def make_loader(corpus: Corpus, args: argparse.Namespace) -> DataLoader:
    """One pass over this loader is the whole training, however long the text is."""
    chunks = Chunks(corpus.train, args.length, CONTEXT)
    sampler = RandomSampler(chunks, num_samples=args.minibatches * args.batch)
    return DataLoader(chunks, batch_size=args.batch, sampler=sampler, collate_fn=keep_batch)


def train(model: CharLM, corpus: Corpus, args: argparse.Namespace) -> tuple[paceline.Run, float]:
    """The usual loop; returns the closed run and the seconds that the loop took."""
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    loader = make_loader(corpus, args)
    run = paceline.attach(model, optimizer, args.rule, log=args.log, seed=args.seed)  # 1
    share = run.share(loader)  # 2
    scheduler = LambdaLR(optimizer, lambda step: learning_rate(share.progress))
    started, recent = time.perf_counter(), 0.0
    with run:
        for inputs, targets in share:
            optimizer.zero_grad()
            loss = model.loss(inputs, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            scheduler.step()
            recent += loss.item()
            if run.minibatches % LOG_EVERY == 0:
                run.log(loss=recent / LOG_EVERY)
                recent = 0.0
    return run, time.perf_counter() - started


def write_result(run: paceline.Run, loss: float, seconds: float, args: argparse.Namespace) -> None:
    """Print the outcome and leave it where the arguments say."""
    result = {
        "rule": run.rule.text() if run.world.size > 1 else "one worker",
        "workers": run.world.size,
        "seed": args.seed,
        "validation_loss": loss,
        "training_s": seconds,
        "minibatches_per_worker": run.minibatches,
        "bytes_sent_per_worker": run.bytes_sent,
    }
    print(f"validation loss {loss:.4f} after {run.minibatches} minibatches, {seconds:.1f} s")
    if args.result:
        args.result.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # a model this small gains nothing from a second core
    torch.manual_seed(args.seed)
    try:
        corpus = load_corpus(args.text)
    except NoText as error:
        sys.exit(f"train.py: {error}")
    model = CharLM()
    run, seconds = train(model, corpus, args)
    if run.world.rank == 0:
        exported = run.model_for_export()
        write_result(run, validation_loss(exported, corpus.validation), seconds, args)
        if args.export:
            torch.save(exported.state_dict(), args.export)


if __name__ == "__main__":
    main()
