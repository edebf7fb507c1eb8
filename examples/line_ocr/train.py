# SPDX-License-Identifier: Apache-2.0
"""Train a reader of short text lines: convolutions, an LSTM and CTC, with Adam.

An ordinary program for one device, and the two lines of paceline (marked 1 and 2)::

    python train.py                                                    # one worker
    paceline run --workers 4 --rule "bmuf_adam(period=8)" train.py     # four

`--minibatches` counts those of all workers together, so both see the same number of lines.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from lines import Lines, library_text, to_text
from model import LineReader, edits
from show import write_picture
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

import paceline

LOG_EVERY = 5  # minibatches
LARGEST_GRADIENT = 1.0
TEST_SEED = 2**31  # far from any seed of training; the words are other files' as well


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a reader of text lines.")
    parser.add_argument("--rule", help='such as "bmuf_adam(period=8)"; default: that of `paceline run`')
    parser.add_argument("--minibatches", type=int, default=4_000, help="of all workers together")
    parser.add_argument("--batch", type=int, default=16, help="lines in a minibatch")
    parser.add_argument("--test-lines", type=int, default=1_000)
    parser.add_argument("--lr", type=float, default=5e-3, help="highest learning rate")
    parser.add_argument("--beta1", type=float, default=0.5, help="Adam's first decay rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path, help="directory for the event log")
    parser.add_argument("--out", type=Path, default=Path("out/line_ocr"), help="for the picture and the result")
    return parser.parse_args()


def learning_rate(share_done: float) -> float:
    """Share of the highest rate: up over the first 5 %, level to 40 %, then down to 1 %."""
    if share_done < 0.4:
        return min(1.0, (share_done + 0.001) / 0.05)
    return 0.01 + 0.99 * (1.0 - share_done) / 0.6


def train(model: LineReader, args: argparse.Namespace) -> tuple[paceline.Run, float]:
    """The usual loop; returns the closed run and the seconds that the loop took."""
    lines = Lines(library_text(held_out=False), args.minibatches * args.batch, args.seed)
    loader = DataLoader(lines, batch_size=args.batch)  # no shuffling: every line is a new one
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr, betas=(args.beta1, 0.999))
    run = paceline.attach(model, optimizer, args.rule, log=args.log, seed=args.seed)  # 1
    share = run.share(loader)  # 2
    scheduler = LambdaLR(optimizer, lambda step: learning_rate(share.progress))
    started, recent = time.perf_counter(), 0.0
    with run:
        for pictures, numbers, lengths in share:
            optimizer.zero_grad()
            loss = model.loss(pictures, numbers, lengths)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_GRADIENT)
            optimizer.step()
            scheduler.step()
            recent += loss.item()
            if run.minibatches % LOG_EVERY == 0:
                run.log(loss=recent / LOG_EVERY)
                recent = 0.0
    return run, time.perf_counter() - started


def test(model: LineReader, args: argparse.Namespace) -> float:
    """Character error rate on held-out lines; the first of them go into a picture."""
    model.eval()
    lines = Lines(library_text(held_out=True), args.test_lines, TEST_SEED)
    wrong = characters = 0
    shown: list[tuple[torch.Tensor, str, str]] = []
    for pictures, numbers, lengths in DataLoader(lines, batch_size=50):
        truths = [row[:length].tolist() for row, length in zip(numbers, lengths, strict=True)]
        for picture, truth, read in zip(pictures, truths, model.read(pictures), strict=True):
            wrong += edits(read, truth)
            characters += len(truth)
            shown.append((picture[0], to_text(truth), to_text(read)))
    write_picture(shown[:24], args.out / "lines.png")
    return wrong / characters


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)  # one core a worker
    torch.manual_seed(args.seed)
    model = LineReader()
    run, seconds = train(model, args)
    if run.world.rank != 0:
        return
    args.out.mkdir(parents=True, exist_ok=True)
    result = {
        "rule": run.rule.text() if run.world.size > 1 else "one worker",
        "workers": run.world.size,
        "seed": args.seed,
        "character_error_rate": test(run.model_for_export(), args),
        "training_s": seconds,
        "minibatches_per_worker": run.minibatches,
        "bytes_sent_per_worker": run.bytes_sent,
    }
    (args.out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(
        f"character error rate {100 * result['character_error_rate']:.2f} % after "
        f"{run.minibatches} minibatches, {seconds:.1f} s; see {args.out / 'lines.png'}"
    )


if __name__ == "__main__":
    main()
