# SPDX-License-Identifier: Apache-2.0
"""Asynchronous SGD of `time_to_quality.py`: each gradient is that of the model as its worker last pulled it.

    theta <- theta - rate g_i(theta_i),  theta_i <- theta      when worker i has computed its minibatch

as `asgd(overlap=0)` does on a simulated clock without network time. The gradients of all workers that began since the
last such moment are computed at once (`torch.func`), since none depends on another: several times as fast as the
production server on virtual workers, which a test compares.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paceline.forecast.sim.clock import Clock

Batch = Sequence[Tensor]


class StaleWorkers:
    """A server's parameters, and N workers with older ones.

    Args:
        model: the start; it gets the server's parameters when a training ends.
        loss: of a minibatch.
        workers: N.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], workers: int) -> None:
        self._model, self._loss = model, loss
        self._layout = [(name, p.shape, p.numel()) for name, p in model.named_parameters()]
        self._server = parameters_to_vector(model.parameters()).detach().clone()
        self._pulled = self._server.repeat(workers, 1)
        self._gradients = torch.zeros_like(self._pulled)
        self._gradient_of = torch.func.vmap(torch.func.grad(self._loss_of))

    def _loss_of(self, flat: Tensor, *batch: Tensor) -> Tensor:
        parts = flat.split([numel for _, _, numel in self._layout])
        named = {name: part.view(shape) for part, (name, shape, _) in zip(parts, self._layout, strict=True)}
        return self._loss(lambda *inputs: torch.func.functional_call(self._model, named, inputs), *batch)

    def train(self, batches: Iterator[Batch], rate: Callable[[int], float], clock: Clock) -> None:
        """Train on all minibatches.

        Args:
            batches: one after another; a worker that begins takes the next.
            rate: minibatches in the model so far -> learning rate.
            clock: that says how long each minibatch takes.
        """
        begun: dict[int, Batch] = {}  # those whose gradient is not computed yet
        ends: list[tuple[float, int]] = []
        now, done, steps = 0.0, 0, [0] * len(self._pulled)
        idle = list(range(len(self._pulled)))
        while True:
            for worker in idle:
                batch = next(batches, None)
                if batch is not None:
                    begun[worker] = batch
                    heapq.heappush(ends, (now + clock.compute_s(worker, steps[worker]), worker))
                    steps[worker] += 1
            if not ends:
                break
            now, worker = heapq.heappop(ends)
            if worker in begun:
                self._compute(begun)
            self._server.sub_(self._gradients[worker], alpha=rate(done))
            self._pulled[worker] = self._server
            idle, done = [worker], done + 1
        vector_to_parameters(self._server, self._model.parameters())

    def _compute(self, begun: dict[int, Batch]) -> None:
        places = torch.tensor(list(begun))
        columns = [torch.stack(column) for column in zip(*begun.values(), strict=True)]
        self._gradients[places] = self._gradient_of(self._pulled[places], *columns)
        begun.clear()
