# SPDX-License-Identifier: Apache-2.0
"""Asynchronous SGD of `time_to_quality.py`: each gradient is that of the model as its worker last pulled it.

    theta <- theta - rate g_i(theta_i),  theta_i <- theta      when worker i has computed its minibatch

as `asgd(overlap=0)` does on a simulated clock without network time. Other asynchronous rules change g_i before, or the
rate, by their own outer step. The gradients of all workers that began since the last such moment are computed at once
(`torch.func`), since none depends on another: several times as fast as the production server on virtual workers, which
a test compares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from _arrivals import arrivals
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from paceline.forecast.sim.clock import Clock
from paceline.rules.outer import Arrival
from paceline.rules.outer.arrival import Push

Batch = Sequence[Tensor]


class StaleWorkers:
    """A server's parameters, and N workers with older ones.

    Args:
        model: the start; it gets the server's parameters when a training ends.
        loss: of a minibatch.
        workers: N.
        outer: how the server applies a gradient.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], workers: int, outer: Arrival) -> None:
        self._model, self._loss = model, loss
        self._layout = [(name, p.shape, p.numel()) for name, p in model.named_parameters()]
        self._server = parameters_to_vector(model.parameters()).detach().clone()
        self._pulled = self._server.repeat(workers, 1)
        self._gradients = torch.zeros_like(self._pulled)
        self._outer, self._state = outer, {name: torch.zeros_like(self._server) for name in outer.tensors}
        self._losses_of = torch.func.vmap(self._loss_of)

    def _loss_of(self, flat: Tensor, *batch: Tensor) -> Tensor:
        parts = flat.split([numel for _, _, numel in self._layout])
        named = {name: part.view(shape) for part, (name, shape, _) in zip(parts, self._layout, strict=True)}
        return self._loss(lambda *inputs: torch.func.functional_call(self._model, named, inputs), *batch)

    def train(
        self,
        batches: Iterator[Batch],
        rate: Callable[[int], float],
        clock: Clock,
        largest_gradient: float | None = None,
    ) -> None:
        """Train on all minibatches.

        Args:
            batches: one after another; a worker that begins takes the next.
            rate: minibatches in the model so far -> learning rate.
            clock: that says how long each minibatch takes.
            largest_gradient: each worker's gradient is scaled down to this norm; None leaves it.
        """
        workers = len(self._pulled)
        begun: dict[int, Batch] = {}  # those whose gradient is not computed yet
        done, highest, since = 0, 0.0, [0] * workers
        under_way = {rank for rank in range(workers) if self._begin(rank, batches, begun)}
        for worker in arrivals(clock, workers):
            if not under_way:
                break
            if worker not in under_way:
                continue  # there was no minibatch for it any more
            if worker in begun:
                self._compute(begun, largest_gradient)
            lr = rate(done)
            highest = max(highest, lr)
            self._push(worker, Push(done - since[worker], done + 1, workers, lr, highest_lr=highest))
            done += 1
            since[worker] = done
            if not self._begin(worker, batches, begun):
                under_way.remove(worker)
        vector_to_parameters(self._server, self._model.parameters())

    @staticmethod
    def _begin(worker: int, batches: Iterator[Batch], begun: dict[int, Batch]) -> bool:
        """Give the worker a minibatch; whether there is one."""
        batch = next(batches, None)
        if batch is not None:
            begun[worker] = batch
        return batch is not None

    def _push(self, worker: int, push: Push) -> None:
        gradient = self._gradients[worker]
        self._outer.mend(gradient, self._server, self._pulled[worker], self._state, push)
        self._server.sub_(gradient, alpha=push.lr * self._outer.rate(push))
        self._pulled[worker] = self._server

    def _compute(self, begun: dict[int, Batch], largest: float | None) -> None:
        places = torch.tensor(list(begun))
        columns = [torch.stack(column) for column in zip(*begun.values(), strict=True)]
        pulled = self._pulled[places].requires_grad_()  # a copy
        (found,) = torch.autograd.grad(self._losses_of(pulled, *columns).sum(), pulled)
        if largest is not None:
            found *= (largest / (found.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1.0)
        self._gradients[places] = found
        begun.clear()
