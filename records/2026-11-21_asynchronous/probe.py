# SPDX-License-Identifier: Apache-2.0
"""What a late gradient misses, and what delay compensation puts in its place, during `asgd` with 16 workers.

At 20 pushes of each task's training the gradient of the same minibatch is taken at two places: at the values w_bak at
which the worker computed it, and at the values w to which it is applied. The change g(w) - g(w_bak) is what a
correction should be. It is compared with

    constant    g g (w - w_bak)                       as published; g is the pushed gradient, clipped as the task clips
    adaptive    g g (w - w_bak) / sqrt(MS + 1e-7)     as published
    fisher      mean_i(g_i g_i) (w - w_bak)           g_i: the gradient of one sample of the minibatch
    hessian     H (w - w_bak)                         exactly, by differentiating twice

by its cosine and by the strength that fits best (least squares). The corrections are those of `DelayCompensated`
itself; what it makes of the gradient with the settings of this record is shown as well. One line of probe.jsonl for
each push. Pushes that come without a delay are passed over::

    python probe.py           --quick: for a moment, kept apart
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import rows
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import paceline
from paceline.forecast.sim import simulate
from paceline.forecast.sim.clock import Clock, exponential
from paceline.rules.outer import DelayCompensated
from paceline.rules.outer.arrival import Push
from paceline.rules.recipes import rule_from_text
from tasks import TASKS, Task

QUICK = "--quick" in sys.argv
OUT = Path(__file__).resolve().parent / ("quick/probe.jsonl" if QUICK else "probe.jsonl")
WORKERS, SEED, POINTS, DECAY = 16, 0, 1 if QUICK else 20, 0.95
if QUICK:
    TASKS = {name: replace(task, minibatches=48) for name, task in TASKS.items()}
KINDS = {kind: DelayCompensated(kind, strength=1.0, decay=DECAY) for kind in ("constant", "adaptive")}
Batch = tuple[Tensor, Tensor]


class Twin:
    """The gradient of a task's loss at any parameters, end to end, in double precision."""

    def __init__(self, task: Task) -> None:
        self._task, self._model = task, task.model().double()

    def _differentiate(self, at: Tensor, batch: Batch, graph: bool) -> Tensor:
        inputs, targets = batch
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        nn.utils.vector_to_parameters(at, self._model.parameters())
        loss = self._task.loss(self._model, inputs, targets)
        parts = torch.autograd.grad(loss, list(self._model.parameters()), create_graph=graph)
        return torch.cat([part.reshape(-1) for part in parts])

    def gradient(self, at: Tensor, batch: Batch) -> Tensor:
        """At parameters `at`, shape (n,), for a minibatch."""
        return self._differentiate(at, batch, graph=False)

    def fisher(self, at: Tensor, batch: Batch) -> Tensor:
        """The mean over the minibatch of the squared gradient of one sample, shape (n,)."""
        samples = list(zip(*(part.split(1) for part in batch), strict=True))
        squares = torch.zeros_like(at)
        for sample in samples:
            squares += self.gradient(at, sample).square() / len(samples)
        return squares

    def hessian(self, at: Tensor, along: Tensor, batch: Batch) -> Tensor:
        """H `along`, shape (n,). Not by a difference: the smallest step crosses kinks of rectifiers."""
        slope = self._differentiate(at, batch, graph=True) @ along
        return flat(torch.autograd.grad(slope, list(self._model.parameters())))


class Probe:
    """What the workers share: how many pushes there were, the moving average over them, the lines so far."""

    def __init__(self, name: str) -> None:
        self.name, self.task, self.twin = name, TASKS[name], Twin(TASKS[name])
        self.pushes = 0
        self.lines: list[dict[str, Any]] = []
        self._squares = torch.zeros(sum(p.numel() for p in self.task.model().parameters()), dtype=torch.float64)
        rules = {way: rows.WAYS[way][name] for way in ("dc_asgd constant", "dc_asgd adaptive")}
        self._rules = {way: rule_from_text(text).arrival for way, text in rules.items()}

    def pushed(self, batch: Batch, delay: int, gradient: Tensor, origin: Tensor, values: Tensor) -> None:
        """A push of `gradient`, computed at `origin`, has arrived where the parameters were `values`; all (n,)."""
        due = self.pushes >= (len(self.lines) + 0.5) * self.task.minibatches / POINTS
        if due and delay:
            about = {"task": self.name, "push": self.pushes, "delay": delay}
            self.lines.append(about | self._compare(batch, gradient, origin, values))
            print(json.dumps(self.lines[-1]), flush=True)
        state = {"squares": self._squares}  # goes on
        KINDS["adaptive"].mend(gradient.clone(), values, origin, state, arrived(delay))
        self.pushes += 1

    def _compare(self, batch: Batch, gradient: Tensor, origin: Tensor, values: Tensor) -> dict[str, Any]:
        then, now = (self.twin.gradient(at, batch) for at in (origin, values))
        clipped = (gradient.norm() / then.norm()).item()  # 1 where it was not
        change, moved = now - then, values - origin
        found = {kind: self._mended(outer, gradient, origin, values) - gradient for kind, outer in KINDS.items()}
        whole = {"fisher": self.twin.fisher(origin, batch) * moved, "hessian": self.twin.hessian(origin, moved, batch)}
        fits = {kind: fit(part, clipped * change) for kind, part in found.items()}
        fits |= {kind: fit(part, change) for kind, part in whole.items()}
        return {
            "clipped": clipped,
            "moved": (moved.norm() / origin.norm()).item(),
            "change": (change.norm() / then.norm()).item(),
            "same_way": cosine(then, now),
            "cosine": {kind: cosine(part, change) for kind, part in (found | whole).items()},
            "strength": fits,
            "rules": {way: self._outcome(way, gradient, origin, values, clipped * now) for way in self._rules},
        }

    def _mended(self, outer: Any, gradient: Tensor, origin: Tensor, values: Tensor) -> Tensor:
        """What `outer` makes of the push."""
        mended, state = gradient.clone(), {"squares": self._squares.clone()}
        outer.mend(mended, values, origin, state, arrived(1))
        return mended

    def _outcome(self, way: str, gradient: Tensor, origin: Tensor, values: Tensor, right: Tensor) -> dict[str, float]:
        """With the settings of this record: how far from the `right` gradient, as a share of the stale one's error."""
        mended = self._mended(self._rules[way], gradient, origin, values)
        error = ((mended - right).norm() / (gradient - right).norm()).item()
        return {"error": error, "length": (mended.norm() / gradient.norm()).item(), "same_way": cosine(mended, right)}


def arrived(delay: int) -> Push:
    """What is known of a push besides its numbers."""
    return Push(delay=delay, update=1, workers=WORKERS, lr=0.0)


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """End to end, in double precision; a copy."""
    return torch.cat([tensor.detach().reshape(-1).double() for tensor in tensors])


def cosine(a: Tensor, b: Tensor) -> float:
    """Of the angle between two vectors."""
    return (a @ b / (a.norm() * b.norm())).item()


def fit(part: Tensor, change: Tensor) -> float:
    """x for which x `part` is nearest to `change`."""
    return (part @ change / (part @ part)).item()


def train(probe: Probe) -> nn.Module | None:
    """The body of one worker: the training of run.py, which tells `probe` of each push."""
    torch.manual_seed(SEED)
    task = probe.task
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=task.lr)
    run = paceline.attach(model, optimizer, "asgd(overlap=0)", seed=SEED)
    share = run.share(task.loader(task.minibatches))
    scheduler = LambdaLR(optimizer, lambda step: task.schedule(step / len(share)))
    seen = 0
    with run:
        for inputs, targets in share:
            optimizer.zero_grad()
            task.loss(model, inputs, targets).backward()
            if task.largest_gradient is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), task.largest_gradient)
            origin, gradient = flat(model.parameters()), flat(p.grad for p in model.parameters())
            optimizer.step()
            # the answer comes at once and is plain SGD's: what the values were before this push follows from it
            values = flat(model.parameters()) + optimizer.param_groups[0]["lr"] * gradient
            probe.pushed((inputs, targets), probe.pushes - seen, gradient, origin, values)
            seen = probe.pushes
            scheduler.step()
    return run.model_for_export() if run.world.rank == 0 else None


def main() -> None:
    torch.set_num_threads(1)
    with OUT.open("w") as file:
        for name in TASKS:
            probe = Probe(name)
            model = simulate(lambda probe=probe: train(probe), WORKERS, clock=Clock(exponential(), seed=SEED))[0]
            assert model is not None
            print(name, TASKS[name].result(model), "(as in results.jsonl)", flush=True)
            file.writelines(json.dumps(line) + "\n" for line in probe.lines)


if __name__ == "__main__":
    main()
