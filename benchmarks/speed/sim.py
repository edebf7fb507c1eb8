# SPDX-License-Identifier: Apache-2.0
"""What a simulation costs: virtual workers against the same minibatches one after another, and stacked ones.

The serial figure is one model in a plain loop that makes all N workers' minibatches, without paceline. The overhead is
the time of N virtual workers under a rule over that; the speed-up that of stacked workers over virtual ones, for the
same minibatches and the same rule. Each figure is the best of `--repeat` runs, taken in turn, in processor seconds,
since one worker runs at a time and nobody waits. What an exchange costs a worker does not shrink with the model, so the
overhead is measured at minibatches of some milliseconds, as those of the examples are. It holds the start of N workers,
each with a model and a session of its own, which a short run feels and a long one does not.

    python benchmarks/speed/sim.py [--workers 64] [--steps 256] [--rule "bmuf(period=8)"] [--width 512] [--small 16]

The last line is a JSON object: `overhead` (at most 1.2 is the aim), `bare_overhead`, the same for N models without
paceline, each trained for eight minibatches in turn and then set to the mean (what memory alone costs), `speedup` (at
least 5), `minibatch_ms` of the serial loop, `start_ms` of a virtual worker without a step, `difference`, the largest
between parameters of stacked and of virtual workers, `workers_1024_s`, the seconds of so many workers (of `--many`)
with 16 minibatches each of the small model, start included, and `many_over_loop`, that over the loop.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "common"))

import _quick
import torch
from torch import Tensor, nn

import paceline
from paceline_plugins.forecast import StackedResult, simulate_stacked

FEATURES, CLASSES = 32, 10


class Task:
    """A perceptron of a given width, and minibatches for N workers.

    Args:
        workers: N.
        steps: of each worker.
        width: of the two hidden layers.
        batch: samples of a minibatch.
    """

    def __init__(self, workers: int, steps: int, width: int, batch: int) -> None:
        g = torch.Generator().manual_seed(0)
        self.workers, self.steps, self.width = workers, steps, width
        self.x = torch.randn(steps, workers, batch, FEATURES, generator=g)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=g)).argmax(-1)

    def start(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """The model and its optimizer, the same in every call."""
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, self.width), nn.Tanh(), nn.Linear(self.width, self.width), nn.Tanh()]
        model = nn.Sequential(*layers, nn.Linear(self.width, CLASSES))
        return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

    def minibatch(self, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
        """One of the minibatches."""
        optimizer.zero_grad()
        loss_of(model, self.x[step, rank], self.y[step, rank]).backward()
        optimizer.step()

    def serial(self) -> None:
        """All minibatches one after another."""
        model, optimizer = self.start()
        for step in range(self.steps):
            for rank in range(self.workers):
                self.minibatch(model, optimizer, step, rank)

    def bare(self, period: int = 8) -> None:
        """N models in turn for a block each, and then their mean in every one: what memory alone costs."""
        made = [self.start() for _ in range(self.workers)]
        for begin in range(0, self.steps, period):
            for rank, (model, optimizer) in enumerate(made):
                for step in range(begin, min(begin + period, self.steps)):
                    self.minibatch(model, optimizer, step, rank)
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model, _ in made), strict=True):
                    mean = parameters[0].clone()
                    for parameter in parameters[1:]:
                        mean.add_(parameter)
                    mean.div_(self.workers)
                    for parameter in parameters:
                        parameter.copy_(mean)

    def virtual(self, rule: str) -> dict[str, Tensor]:
        """With virtual workers; the global model."""

        def program() -> dict[str, Tensor]:
            model, optimizer = self.start()
            with paceline.attach(model, optimizer, rule, guard=None) as run:
                for step in range(self.steps):
                    self.minibatch(model, optimizer, step, run.world.rank)
            return dict(run.model_for_export().named_parameters()) if run.world.rank == 0 else {}

        return paceline.simulate(program, self.workers)[0] or {}

    def stacked(self, rule: str) -> StackedResult:
        """With stacked workers."""
        model, optimizer = self.start()
        return simulate_stacked(model, loss_of, optimizer, rule, zip(self.x, self.y, strict=True))

    def warm_up(self, rule: str) -> None:
        """Each way once, so that nothing is made for the first time when the clock runs."""
        self.serial()
        self.virtual(rule)
        self.stacked(rule)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Of a minibatch."""
    return nn.functional.cross_entropy(model(x), y)


def best(repeat: int, *ways: Callable[[], object]) -> list[float]:
    """The least processor seconds of each way; they take turns, so that a busy moment does not fall on one of them."""
    found = [float("inf")] * len(ways)
    for _ in range(repeat):
        for place, way in enumerate(ways):
            began = time.process_time()
            way()
            found[place] = min(found[place], time.process_time() - began)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=256, help="of each worker")
    parser.add_argument("--rule", default="bmuf(period=8)")
    parser.add_argument("--width", type=int, default=512, help="of the model for the overhead")
    parser.add_argument("--small", type=int, default=16, help="width of the model for the speed-up")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--many", type=int, default=1024, help="workers of the small model, 16 minibatches each")
    options = _quick.parse(parser, workers=4, steps=8, repeat=1, width=64, many=32)
    torch.set_num_threads(1)
    task = Task(options.workers, options.steps, options.width, options.batch)
    small = Task(options.workers, options.steps, options.small, options.batch)
    for width in (options.width, options.small):
        Task(2, 8, width, options.batch).warm_up(options.rule)
    serial, virtual, bare = best(options.repeat, task.serial, lambda: task.virtual(options.rule), task.bare)
    task.steps = 0
    (start,) = best(options.repeat, lambda: task.virtual(options.rule))
    plain, stacked = best(
        options.repeat, lambda: small.virtual(options.rule), lambda: small.stacked(options.rule).parameters
    )
    ends = small.stacked(options.rule).parameters
    whole = small.virtual(options.rule)
    difference = max(float((whole[name].detach() - ends[name]).abs().max()) for name in ends)
    many = Task(options.many, 16, options.small, 16)
    loop, crowd = best(1, many.serial, lambda: many.virtual(options.rule))
    count = options.workers * options.steps
    for name, seconds in (
        (f"serial, width {options.width}", serial),
        (f"bare, width {options.width}", bare),
        (f"virtual, width {options.width}", virtual),
        (f"virtual, width {options.small}", plain),
        (f"stacked, width {options.small}", stacked),
    ):
        print(f"{name:22} {1e3 * seconds / count:8.3f} ms a minibatch")
    figures = {"overhead": virtual / serial, "bare_overhead": bare / serial, "speedup": plain / stacked}
    figures |= {"minibatch_ms": 1e3 * serial / count, "start_ms": 1e3 * start / options.workers}
    figures |= {"difference": difference, "workers_1024_s": crowd, "many_over_loop": crowd / loop}
    print(json.dumps({name: float(f"{value:.4g}") for name, value in figures.items()}))


if __name__ == "__main__":
    main()
