# SPDX-License-Identifier: Apache-2.0
"""A model whose weights are a count: which samples entered it, in which epoch and how often.

`entered` has a row for each sample of each epoch and a column for each exchange; `shares` has a row for each worker.
A worker that has made m minibatches since the last exchange, with sample s in n of them, holds in the column of the
coming exchange

    entered[s] = n / m       shares[worker] = 1 / m

Plain SGD of rate 1 with the gradient `weights - these` puts them there. The exchange takes the mean of the workers'
progress with the weights m_i / M (M minibatches in all): with momentum 0 and rate 1 it leaves sum(n_i) / M in `entered`
and 1 / M in `shares` for each worker that took part, so their quotient is the number of times that the sample
entered. Nothing is read from a ledger, a log or a book: the weights that a run ends with say it all.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn

PLACES = 128  # of workers: a worker's number modulo this
NEAR = 1e-3


class Counting(nn.Module):
    """The weights.

    Args:
        samples, epochs: of the training.
        exchanges: that it may have at most.
    """

    def __init__(self, samples: int, epochs: int, exchanges: int) -> None:
        super().__init__()
        self.samples, self.exchanges = samples, exchanges
        self.entered = nn.Parameter(torch.zeros(samples * epochs, exchanges))
        self.shares = nn.Parameter(torch.zeros(PLACES, exchanges))
        self._exchange, self._made, self._rows = -1, 0, [torch.zeros(0, dtype=torch.int64)]

    def count(self, ids: Tensor, epoch: int, worker: int, exchange: int) -> None:
        """Set the gradients of a minibatch: `ids` of the samples, shape (batch,); exchanges count from 0."""
        if exchange >= self.exchanges:
            raise SystemExit(f"there were {exchange} exchanges, and the model has {self.exchanges} columns")
        if exchange != self._exchange:
            self._exchange, self._made, self._rows = exchange, 0, []
        self._made += 1
        self._rows.append(ids + epoch * self.samples)
        rows = len(self.entered)
        wanted = torch.bincount(torch.cat(self._rows), minlength=rows).to(self.entered.dtype) / self._made
        for weights, column in ((self.entered, wanted), (self.shares, self._own(worker))):
            weights.grad = torch.zeros_like(weights)
            weights.grad[:, exchange] = weights.detach()[:, exchange] - column

    def _own(self, worker: int) -> Tensor:
        column = torch.zeros(PLACES)
        column[worker % PLACES] = 1 / self._made
        return column


@dataclass(frozen=True)
class Count:
    """What a model has counted.

    Attributes:
        lost: samples of epochs that are not in it.
        repeated: times that samples of epochs are in it beyond the first.
        worst: the most often that one is in it.
    """

    lost: int
    repeated: int
    worst: int

    @classmethod
    def of(cls, times: Tensor) -> Count:
        """Of how often each sample of each epoch is in the model."""
        often = Counter(times.tolist())
        repeated = sum((k - 1) * count for k, count in often.items() if k > 1)
        return cls(often[0], repeated, max(often))


def times(entered: Tensor, shares: Tensor) -> Tensor:
    """How often each sample of each epoch entered, shape (samples * epochs,).

    Raises:
        ValueError: the weights are not those that whole exchanges leave.
    """
    total = torch.zeros(len(entered), dtype=torch.int64)
    for exchange in range(entered.shape[1]):
        share = shares[:, exchange]
        share = share[share.abs() > NEAR / 1000]
        column = entered[:, exchange].double()
        if not len(share):
            if column.abs().max() > NEAR / 1000:
                raise ValueError(f"samples entered with exchange {exchange}, and no worker took part in it")
            continue
        if share.max() - share.min() > NEAR * share.max():
            raise ValueError(f"exchange {exchange} has shares of {share.tolist()}: parts of several are in one")
        found = column / share.double().mean()
        whole = found.round()
        if (found - whole).abs().max() > NEAR * max(1.0, float(whole.max())) or whole.min() < 0:
            raise ValueError(f"exchange {exchange} has samples that entered {found[found != whole][:4].tolist()} times")
        total += whole.to(torch.int64)
    return total
