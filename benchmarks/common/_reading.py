# SPDX-License-Identifier: Apache-2.0
"""What readers of lines and listeners to speech have in common: minibatches, rates, errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from _ctc import edits
from _permutations import pieces
from torch import Tensor

LARGEST_GRADIENT = 1.0
WARM, LEVEL, LEAST = 0.05, 0.4, 0.01
CHUNK = 64  # minibatches that are made at once; the number of workers divides it

Take = Callable[[Tensor, torch.Generator], Sequence[Tensor]]


def factor(done: float) -> float:
    """Share of the highest rate at a share of the samples: up over 5 %, level to 40 %, then down to 1 %."""
    if done < LEVEL:
        return min(1.0, (done + 0.001) / WARM)
    return LEAST + (1 - LEAST) * (1 - done) / (1 - LEVEL)


def chunks(samples: int, count: int, batch: int, workers: int, seed: int, take: Take) -> Iterator[list[Tensor]]:
    """CHUNK minibatches at a time, tensors (CHUNK / N, N, B, ...): a step of N workers after another.

    Minibatch number `step * N + worker` of `count` is the same one whatever N is. Every pass over the samples has an
    order of its own. `count` and CHUNK are whole multiples of CHUNK and N.

    Args:
        samples: how many there are.
        count: minibatches of all workers.
        batch: samples of a minibatch.
        workers: N.
        seed: of the order and of the dice.
        take: gives the samples of these places, made dirty with the dice.
    """
    if count % CHUNK or CHUNK % workers:
        raise SystemExit(
            f"{count} minibatches on {workers} workers: give a multiple of {CHUNK}, and workers that divide {CHUNK}"
        )
    places = pieces(samples, CHUNK * batch, seed)
    for chunk, mine in zip(range(count // CHUNK), places, strict=False):
        dice = torch.Generator().manual_seed((seed + 1) * 1_000_003 + chunk)
        yield [tensor.unflatten(0, (CHUNK // workers, workers, batch)) for tensor in take(mine, dice)]


def error_rate(found: Sequence[list[int]], truths: Sequence[list[int]]) -> float:
    """Edits over what there is to read."""
    return sum(edits(*pair) for pair in zip(found, truths, strict=True)) / sum(map(len, truths))
