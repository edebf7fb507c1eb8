# SPDX-License-Identifier: Apache-2.0
"""Sampling and beam search over a model that writes one symbol at a time.

A sequence y of T symbols has log P(y) = sum of log P(y[t] | before) + log P(end | y). A model writes `longest` symbols
at most: after that many the end is certain, so that the probabilities of all sequences up to `longest` sum to 1.
Samples, the beam and `log_prob` use this one distribution.

The end of a sequence is the symbol `words`, one more than the last real one; models also take it as the beginning.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from paceline_dual.sequences import PADDING, trim


class Steps(Protocol):
    """A model that is writing k rows for each of B inputs."""

    words: int
    longest: int

    def step(self, last: Tensor) -> Tensor:
        """log P of the next symbol or the end, [B, k, words + 1], given the last symbols [B, k] (`words` to begin)."""
        ...

    def reorder(self, rows: Tensor) -> None:
        """Row j of input b continues row rows[b, j] of the same input; rows [B, k]."""
        ...

    def keep(self, inputs: Tensor) -> None:
        """Continue only these inputs [b], in this order."""
        ...


def sample(steps: Steps, inputs: int, k: int, device: torch.device, generator: torch.Generator | None) -> Tensor:
    """k independent draws for each input, [B, k, T]. Inputs whose rows have all ended are dropped."""
    end = steps.words
    found = torch.full((inputs, k, steps.longest), PADDING, dtype=torch.int64, device=device)
    active = torch.arange(inputs, device=device)
    last = torch.full((inputs, k), end, dtype=torch.int64, device=device)
    done = torch.zeros(inputs, k, dtype=torch.bool, device=device)
    for t in range(steps.longest if inputs else 0):
        drawn = _draw(steps.step(last), generator)
        done = done | (drawn == end)
        found[active, :, t] = drawn.masked_fill(done, PADDING)
        last = drawn
        finished = done.all(1)
        count = int(finished.sum())
        if count == len(active):
            break
        if 4 * count >= len(active):  # not at every step, since dropping some copies the rest
            going = (~finished).nonzero()[:, 0]
            active, last, done = active[going], last[going], done[going]
            steps.keep(going)
    return trim(found)


def _draw(log_probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """An index for each row of [B, k, n], shape [B, k]: where the cumulative sum of P passes a uniform number.

    One random number for each row; torch.multinomial draws n, which took a sixth of the time.
    """
    sums = log_probs.double().exp().cumsum(-1)
    where = torch.rand(*sums.shape[:2], 1, generator=generator, dtype=sums.dtype, device=sums.device) * sums[..., -1:]
    return torch.searchsorted(sums, where, right=True)[..., 0].clamp(max=sums.shape[-1] - 1)


class _Beam:
    """k unfinished sequences of each input, the k best finished ones, and the log P of all of them."""

    def __init__(self, inputs: int, k: int, longest: int, device: torch.device) -> None:
        self.live = torch.full((inputs, k, longest), PADDING, dtype=torch.int64, device=device)
        self.scores = torch.full((inputs, k), -torch.inf, dtype=torch.float64, device=device)
        self.scores[:, 0] = 0.0  # one empty sequence, so that no two rows are ever the same
        self.ended = self.live.clone()
        self.finals = torch.full_like(self.scores, -torch.inf)

    def finish(self, scores: Tensor) -> None:
        """Add the live sequences, ended here with these log P [B, k], to the finished ones."""
        k = scores.shape[1]
        self.finals, order = torch.cat((self.finals, scores), 1).topk(k, 1)
        self.ended = torch.cat((self.ended, self.live), 1).gather(1, order[..., None].expand_as(self.live))

    def extend(self, scores: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """Keep the k best extensions [B, k, words] by symbol t; the rows that they extend, and the symbols."""
        self.scores, order = scores.flatten(1).topk(scores.shape[1], 1)
        rows, symbols = order // scores.shape[2], order % scores.shape[2]
        self.live = self.live.gather(1, rows[..., None].expand_as(self.live))
        self.live[:, :, t] = symbols
        return rows, symbols

    def decided(self) -> Tensor:
        """Inputs [B] whose finished sequences cannot be overtaken: more symbols make a sequence less probable."""
        return self.scores[:, 0] <= self.finals[:, -1]

    def keep(self, inputs: Tensor) -> None:
        """Continue only these inputs."""
        self.live, self.scores = self.live[inputs], self.scores[inputs]
        self.ended, self.finals = self.ended[inputs], self.finals[inputs]


def beam(steps: Steps, inputs: int, k: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The k most probable sequences that a beam of k finds for each input: [B, k, T] and log P [B, k], best first.

    Finished and unfinished sequences are ranked by log P, without any bonus for length, and do not push each other out.
    The search ends when no unfinished sequence can overtake the k finished ones. With k of at least the number of all
    sequences the ranking is exact.
    """
    end = steps.words
    state = _Beam(inputs, k, steps.longest, device)
    found, log_probs = state.ended.clone(), state.finals.clone()
    active, kind = torch.arange(inputs, device=device), torch.get_default_dtype()
    last = torch.full((inputs, k), end, dtype=torch.int64, device=device)
    for t in range(steps.longest if inputs else 0):
        following = steps.step(last)
        scores, kind = state.scores[..., None] + following, following.dtype
        state.finish(scores[..., end])
        rows, last = state.extend(scores[..., :end], t)
        decided = state.decided()
        count = int(decided.sum())
        if count == len(active):
            break
        steps.reorder(rows)
        if 4 * count >= len(active):  # as in `sample`
            found[active], log_probs[active] = state.ended, state.finals
            going = (~decided).nonzero()[:, 0]
            active, last = active[going], last[going]
            state.keep(going)
            steps.keep(going)
    else:
        state.finish(state.scores)  # the end is certain
    found[active], log_probs[active] = state.ended, state.finals
    return trim(found.masked_fill(log_probs.isneginf()[..., None], PADDING)), log_probs.to(kind)
