# SPDX-License-Identifier: Apache-2.0
"""A model that counts under asynchronous rules: how often each sample entered each shard.

The parameters are rows of 64 numbers, and a row is a shard; number s of each row is how often sample s entered it:
plain SGD of rate 1 adds 1. A push of m gathered gradients holds their mean, so that the gradient of the m-th minibatch
after a push is

    g_m = (m - 1) t_(m-1) - m t_m            t_m: how often each sample is in the first m minibatches

whose mean is -t_m. A block's displacement is the sum of its steps, each with the gradient t_(m-1) - t_m. Nothing is
read from a ledger, a log or a book.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.rules.topology.sharded import UNIT


class Ones(nn.Module):
    """The weights.

    Args:
        rows: of each parameter.
        parameters: how many there are; each has an optimizer of its own.
    """

    def __init__(self, rows: int, parameters: int) -> None:
        super().__init__()
        self.counts = nn.ParameterList([nn.Parameter(torch.zeros(rows * UNIT)) for _ in range(parameters)])
        self._pushes = [-1] * parameters
        self._gathered = [0] * parameters
        self._total = [torch.zeros(UNIT) for _ in range(parameters)]

    def count(self, ids: Tensor, pushes: list[int], means: bool) -> None:
        """Set the gradients of a minibatch.

        Args:
            ids: of the samples, shape (batch,).
            pushes: of each parameter, so far.
            means: whether a push is a mean of gradients; else what steps have changed.
        """
        new = torch.bincount(ids, minlength=UNIT).to(torch.float32)
        for k, parameter in enumerate(self.counts):
            if pushes[k] != self._pushes[k] or not means:
                self._pushes[k], self._gathered[k], self._total[k] = pushes[k], 0, torch.zeros(UNIT)
            before = self._gathered[k] * self._total[k]
            self._gathered[k] += 1
            self._total[k] = self._total[k] + new
            row = before - self._gathered[k] * self._total[k]
            parameter.grad = row.repeat(len(parameter) // UNIT)

    def times(self) -> Tensor:
        """How often each sample is in each row, shape (rows, 64)."""
        return torch.cat([parameter.detach().reshape(-1, UNIT) for parameter in self.counts]).clone()
