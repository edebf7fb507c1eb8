# SPDX-License-Identifier: Apache-2.0
"""What being attached costs a step between two synchronisations.

Two processes train a small model with two plain SGD optimizers over the same parameters, a step of each in turn; one of
them is attached under `bmuf` with a block that does not end. The model is sized so that a step takes
about 5 ms. The figure is the ratio of the medians.

    python benchmarks/speed/step_overhead.py [--steps 500]

The last line is a JSON object: `ratio`, and `step_ms` without paceline.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from _workers import answer, is_worker, launch
from torch import nn

import paceline

WARM = 20


class Training:
    """A small net, and one step of it with either of two optimizers over the same parameters."""

    def __init__(self, width: int) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)]
        self.model = nn.Sequential(*layers)
        self.plain = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.attached = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.x, self.y = torch.randn(64, 64), torch.randint(10, (64,))

    def step(self, optimizer: torch.optim.Optimizer) -> float:
        """Seconds of one step."""
        began = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(self.x), self.y).backward()
        optimizer.step()
        return time.perf_counter() - began


def width_for(target_s: float) -> int:
    """The width at which a step takes about `target_s`."""
    width = 128
    while True:
        training = Training(width)
        median = statistics.median(training.step(training.plain) for _ in range(20))
        if median >= 0.8 * target_s or width >= 4096:
            return width
        width = int(width * min(2.0, max(1.1, (target_s / median) ** 0.5)))


def worker(steps: int, width: int) -> None:
    """Time the same model, a step without and a step with paceline in turn."""
    torch.set_num_threads(1)
    training = Training(width)
    rows: tuple[list[float], list[float]] = ([], [])
    with paceline.attach(training.model, training.attached, "bmuf(period=1000000000)"):
        for number in range(2 * (steps + WARM)):
            seconds = training.step(training.attached if number % 2 else training.plain)
            if number >= 2 * WARM:
                rows[number % 2].append(seconds)
    answer({"plain_s": statistics.median(rows[0]), "attached_s": statistics.median(rows[1])})


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=500, help="without, and as many with paceline")
    parser.add_argument("--width", type=int, default=0, help="of the net; 0 finds the one for a step of 5 ms")
    options = _quick.parse(parser, steps=20, width=256)
    if is_worker():
        worker(options.steps, options.width)
        return
    torch.set_num_threads(1)
    width = options.width or width_for(0.005)
    found = launch(__file__, ["--steps", str(options.steps), "--width", str(width)], 2, 600)
    ratio = found["attached_s"] / found["plain_s"]
    print(f"{'step':14} {'median':>10}")
    print(f"{'not attached':14} {1e3 * found['plain_s']:7.3f} ms")
    print(f"{'attached':14} {1e3 * found['attached_s']:7.3f} ms  ({ratio:.4f} times)")
    print(json.dumps({"ratio": round(ratio, 4), "step_ms": round(1e3 * found["plain_s"], 3)}))


if __name__ == "__main__":
    main()
