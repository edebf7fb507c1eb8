# SPDX-License-Identifier: Apache-2.0
"""The loss of blocks that end by time over that of even blocks, at equal samples, among virtual workers.

    python records/2026-11-29_uneven/quality.py [--minibatches 8192] [--seeds 0,1,2]

The task is to guess the next character of Python's library from the last twelve, by SGD and by Adam under a cosine. The
last line is a JSON object: `loss_over_even`, by optimizer and speeds, of the mean losses, less 1; `losses` (optimizer,
speeds, rule, seed, loss, minibatches of each worker); a run of one worker stands under the rule "one".
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "char_lm"))

import paceline
from data import load_corpus

CONTEXT, BATCH, WIDTH, CORPUS = 12, 16, 96, load_corpus()
SPEEDS = {
    "1 x 3, 1/5": [1, 1, 1, 0.2],
    "1, .8, .5, .2": [1, 0.8, 0.5, 0.2],
    "16, 1 to 1/5": [1] * 6 + [0.5] * 6 + [0.2] * 4,
}
KINDS: dict[str, tuple[Any, float, str]] = {
    "SGD": (torch.optim.SGD, 0.3, "bmuf(period=8{})"),
    "Adam": (torch.optim.Adam, 3e-3, "bmuf_adam(period=8{})"),
}


def train(kind: str, rule: str, seed: int, minibatches: int) -> tuple[float, int]:
    """One worker's."""
    make, rate, _ = KINDS[kind]
    samples = CORPUS.train.unfold(0, CONTEXT + 1, 1)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(seed))[: minibatches * BATCH]
    loader = DataLoader(TensorDataset(samples[order]), BATCH, shuffle=True)
    torch.manual_seed(seed)
    symbols = int(CORPUS.train.max()) + 1
    model = nn.Sequential(nn.Embedding(symbols, 16), nn.Flatten(), nn.Linear(CONTEXT * 16, WIDTH), nn.ReLU())
    model.append(nn.Linear(WIDTH, symbols))
    optimizer = make(model.parameters(), lr=rate)
    with paceline.attach(model, optimizer, rule) as run:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(run.share(loader)))
        for (rows,) in run.share(loader):
            optimizer.zero_grad()
            F.cross_entropy(model(rows[:, :-1].int()), rows[:, -1].long()).backward()
            optimizer.step()
            schedule.step()
        made = run.minibatches
    held = CORPUS.validation.unfold(0, CONTEXT + 1, 1)[::7][:20000]
    with torch.no_grad():
        return F.cross_entropy(model(held[:, :-1].int()), held[:, -1].long()).item(), made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minibatches", type=int, default=8192, help="of all workers")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs")
    options = parser.parse_args()
    if options.quick:
        options.minibatches, options.seeds = 96, "0"
    rows, mixes = list[list[Any]](), dict(list(SPEEDS.items())[: 1 if options.quick else None])
    for seed in map(int, options.seeds.split(",")):
        for kind, (_, _, rule) in KINDS.items():
            cells = [
                ("one", [1], "one"),
                *((name, one, how) for name, one in mixes.items() for how in ("", ", even=False")),
            ]
            for name, speeds, how in cells:
                text = rule.format("" if how == "one" else how)
                clock = paceline.Clock(compute=[1 / one for one in speeds], network=1e-4)
                body = lambda kind=kind, text=text: train(kind, text, seed, options.minibatches)  # noqa: B023, E731
                outs = [out for out in paceline.simulate(body, len(speeds), clock=clock) if out is not None]
                rows.append(
                    [kind, name, how if how == "one" else text, seed, round(outs[0][0], 4), [o[1] for o in outs]]
                )
                print(*rows[-1], flush=True)

    def mean(kind: str, name: str, uneven: bool) -> float:
        return statistics.fmean(
            row[4] for row in rows if row[:2] == [kind, name] and ("even=False" in row[2]) == uneven
        )

    over = {f"{k}, {n}": round(mean(k, n, True) / mean(k, n, False) - 1, 4) for k in KINDS for n in mixes}
    print(json.dumps({"loss_over_even": over, "losses": rows}))


if __name__ == "__main__":
    main()
