# SPDX-License-Identifier: Apache-2.0
"""Many asynchronous trainings of a small CNN at once: the rows of a stack, which see the same minibatches.

Update t of a row applies the gradient of minibatch t at the values of tau(t) updates ago:

    one worker           tau = 0
    N workers            tau as paceline's simulated clock orders their pushes (no network time, `overlap=0`)
    synchronous, N       tau = t mod N: N gradients at one point, and each moves the model by itself: N times the rate

The gradient is mended by the library's own outer step, and plain SGD applies it. The network is two convolutions with
stride 2 and a linear layer; all rows run in the same kernels, as groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from _arrivals import arrivals
from _letters import cut
from torch import Tensor

from paceline.communication.virtual.clock import Clock, uniform
from paceline.rules.outer.arrival import Arrival, Push
from paceline.rules.recipes import rule_from_text

CHANNELS = (1, 8, 16)
PLACES = 16  # of the last convolution's 4 x 4
HALVES = ("fresh first half", "fresh second half")
KEPT = 64  # of the last values; no push may be later


def shapes(classes: int) -> list[tuple[int, ...]]:
    """Of one row's parameters."""
    first, second, third = CHANNELS
    return [
        *((second, first, 3, 3), (second,)),
        *((third, second, 3, 3), (third,)),
        *((third * PLACES, classes), (classes,)),
    ]


def initial(classes: int, seed: int) -> Tensor:
    """One row's parameters end to end: uniform in 1 / sqrt(fan in), as torch's layers."""
    dice = torch.Generator().manual_seed(seed)
    parts = []
    for weight, bias in zip(shapes(classes)[::2], shapes(classes)[1::2], strict=True):
        fan_in = weight[0] if len(weight) == 2 else 9 * weight[1]
        for shape in (weight, bias):
            parts.append((2 * torch.rand(shape, generator=dice) - 1).flatten() / fan_in**0.5)
    return torch.cat(parts)


def losses(flat: Tensor, pictures: Tensor, classes: Tensor, outputs: int) -> tuple[Tensor, Tensor]:
    """(mean loss, share of errors) of each row, both (rows,).

    Args:
        flat: parameters (rows, n).
        pictures: (B, 1, side, side), which all rows see.
        classes: (B,).
        outputs: number of classes.
    """
    rows = len(flat)
    sizes = [torch.Size(shape).numel() for shape in shapes(outputs)]
    parts = flat.split(sizes, 1)
    w1, b1, w2, b2, w3, b3 = (p.reshape(rows, *s) for p, s in zip(parts, shapes(outputs), strict=True))
    x = F.relu(F.conv2d(pictures, w1.flatten(0, 1), b1.flatten(), stride=2, padding=1))
    x = F.relu(F.conv2d(x, w2.flatten(0, 1), b2.flatten(), stride=2, padding=1, groups=rows))
    x = x.reshape(len(x), rows, -1).transpose(0, 1)
    logits = torch.baddbmm(b3[:, None], x, w3)  # (rows, B, outputs)
    right = logits.gather(2, classes.expand(rows, -1)[..., None])[..., 0]
    loss = (logits.logsumexp(2) - right).mean(1)
    return loss, (logits.argmax(2) != classes).float().mean(1)


def gradients(flat: Tensor, pictures: Tensor, classes: Tensor, outputs: int) -> Tensor:
    """Of each row's loss, (rows, n)."""
    at = flat.detach().requires_grad_()
    (found,) = torch.autograd.grad(losses(at, pictures, classes, outputs)[0].sum(), at)
    return found


def simulated_delays(clock: Clock, workers: int) -> Iterator[int]:
    """tau of each push, in the order in which pushes arrive."""
    pulled = [0] * workers
    for version, rank in enumerate(arrivals(clock, workers)):
        yield version - pulled[rank]
        pulled[rank] = version + 1


def halved(delays: Iterator[int], half: int, fresh: int) -> Iterator[int]:
    """No delay in one half: the first (0) or the second (1)."""
    for update, delay in enumerate(delays):
        yield 0 if (update >= half) == fresh else delay


def lockstep_delays(workers: int) -> Iterator[int]:
    """tau of N gradients at one point, one after another."""
    while True:
        yield from range(workers)


@dataclass(frozen=True)
class Row:
    """One training.

    Attributes:
        method: name in the tables.
        workers: N.
        rate: of the first half; a tenth of it in the third quarter, a hundredth in the last.
        rule: as a user writes it; empty for one worker; "lockstep" for synchronous steps; "hessian" for `asgd` whose
            gradients are mended with their minibatch's exact Hessian; one of HALVES for `asgd` without delays there.
        minibatches: of all workers.
        seed: of values, data and computing times.
    """

    method: str
    workers: int
    rate: float
    rule: str
    minibatches: int
    seed: int

    def delays(self) -> Iterator[int]:
        """tau of each update."""
        if self.workers == 1:
            return lockstep_delays(1)
        if self.rule == "lockstep":
            return lockstep_delays(self.workers)
        late = simulated_delays(Clock(uniform(), seed=self.seed), self.workers)
        if self.rule in HALVES:
            return halved(late, self.minibatches // 2, HALVES.index(self.rule))
        return late

    def outer(self) -> Arrival | None:
        """What mends its gradients."""
        return rule_from_text(self.rule).arrival if self.rule.startswith("dc_asgd") else None

    def rate_at(self, update: int) -> float:
        """The learning rate of update t, the first is 0; 0 when the training is over."""
        quarter = 4 * update // self.minibatches
        return self.rate * (1.0, 1.0, 0.1, 0.01)[quarter] if quarter < 4 else 0.0


class Stack:
    """Trains rows of one seed at once.

    Args:
        rows: what to train.
        data: pictures, which are cut anew in each minibatch, and classes.
        outputs: number of classes.
        batch: pictures of a minibatch.
    """

    def __init__(self, rows: Sequence[Row], data: tuple[Tensor, Tensor], outputs: int, batch: int = 32) -> None:
        (self.seed,) = {row.seed for row in rows}
        self.rows, self.data, self.outputs, self.batch = rows, data, outputs, batch
        self.values = initial(outputs, self.seed).expand(len(rows), -1).clone()
        self.update = 0
        self._past = self.values.expand(KEPT, -1, -1).clone()  # the values before each of the last updates
        self._delays = [row.delays() for row in rows]
        self._outers = [row.outer() for row in rows]
        self._states = [
            {name: torch.zeros_like(self.values[0]) for name in o.tensors} if o else {} for o in self._outers
        ]
        self._dice = torch.Generator().manual_seed(1000 + self.seed)
        self._order = torch.empty(0, dtype=torch.long)

    def minibatch(self) -> tuple[Tensor, Tensor]:
        """The next, of a pass in random order."""
        if len(self._order) < self.batch:
            self._order = torch.randperm(len(self.data[1]), generator=self._dice)
        chosen, self._order = self._order[: self.batch], self._order[self.batch :]
        return cut(self.data[0][chosen], self._dice), self.data[1][chosen]

    def step(self) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor]]:
        """One update of all rows; (gradients as pushed, the values that they were computed at, the minibatch)."""
        t, batch = self.update, self.minibatch()
        self._past[t % KEPT] = self.values
        delays = [next(each) for each in self._delays]
        if max(delays) >= KEPT:
            raise SystemExit(f"a push is {max(delays)} updates late, and {KEPT} are kept: raise KEPT")
        places = torch.tensor([(t - delay) % KEPT for delay in delays])
        origins = self._past[places, torch.arange(len(self.rows))]
        pushed = gradients(origins, *batch, self.outputs)
        mended = pushed.clone()
        for k, (row, outer) in enumerate(zip(self.rows, self._outers, strict=True)):
            if outer is not None:
                push = Push(delays[k], t + 1, row.workers, row.rate_at(t), 0.0, row.rate)
                outer.mend(mended[k], self.values[k], origins[k], self._states[k], push)
        exact = [k for k, row in enumerate(self.rows) if row.rule == "hessian"]
        if exact:
            moved = self.values[exact] - origins[exact]
            mended[exact] += hessian_times(origins[exact], moved, *batch, self.outputs)
        self.values -= torch.tensor([[row.rate_at(t)] for row in self.rows]) * mended
        self.update += 1
        return pushed, origins, batch


def hessian_times(flat: Tensor, along: Tensor, pictures: Tensor, classes: Tensor, outputs: int) -> Tensor:
    """Each row's H `along`, (rows, n), exactly."""
    at = flat.detach().requires_grad_()
    loss = losses(at, pictures, classes, outputs)[0].sum()
    (slope,) = torch.autograd.grad(loss, at, create_graph=True)
    (found,) = torch.autograd.grad((slope * along).sum(), at)
    return found


@torch.no_grad()
def held_out(values: Tensor, data: tuple[Tensor, Tensor], outputs: int) -> tuple[list[float], list[float]]:
    """(loss in nats, errors in %) of each row."""
    parts = [losses(values, x, y, outputs) for x, y in zip(data[0].split(500), data[1].split(500), strict=True)]
    loss, wrong = (torch.stack(each).mean(0) for each in zip(*parts, strict=True))
    return loss.tolist(), (100 * wrong).tolist()
