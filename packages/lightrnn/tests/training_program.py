# SPDX-License-Identifier: Apache-2.0
"""What real processes do for the tests of training: one worker each, told where it is by the environment."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

import paceline
from paceline_lightrnn import rounds
from paceline_lightrnn.training import train
from test_lightrnn_training import COURSE, chain, data, model


def costs_of_all() -> bool:
    """Whether what the workers gathered adds up to what one of them gathers alone."""
    mine, text = model(), chain(300)
    with paceline.attach(mine, torch.optim.SGD(mine.parameters(), lr=0.1), "sync") as run:
        part = (run.world.rank, run.world.size)
        costs = rounds.gather(mine, text, length=15, window=5, part=part)
        rounds.add_up(run, costs.tensors())
        whole = rounds.gather(mine, text, length=15, window=5)
    both = list(zip(costs.tensors(), whole.tensors(), strict=True))
    return all(torch.allclose(a, b, rtol=1e-4, atol=1e-3) for a, b in both) and float(both[0][0].sum()) > 0


def main() -> None:
    folder = Path(sys.argv[-1])
    added_up, mine = costs_of_all(), model()
    history = train(mine, data(), COURSE, folder / "out", rule="bmuf(period=4)")
    said = {"costs": added_up, "table": rounds.table_sum(mine.table), "last": history[-1]["perplexity"]}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    main()
