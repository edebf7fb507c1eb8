# SPDX-License-Identifier: Apache-2.0
"""The interface of the language models: loss, perplexity, generation word by word."""

from __future__ import annotations

import math
from abc import abstractmethod

import torch
from torch import Tensor, nn

from paceline_lightrnn.state import PADDING, State


class LanguageModel(nn.Module):
    """The interface of LightRNN and of the models to compare it with.

    Attributes:
        words: V, the size of the vocabulary.
    """

    words: int

    @abstractmethod
    def begin(self, batch: int, word: int = 0) -> State:
        """The state of `batch` sequences after `word` alone, by convention the end of a line."""

    @abstractmethod
    def log_prob(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """log P of each word given all before, shape [B, T] as `words`, and the state after them.

        Args:
            words: shape [B, T], integers; `PADDING` at the end of a sequence has log-probability 0.
            state: of the B sequences so far; None for `begin(B)`.

        Returns:
            Natural logarithms, and the state after the last word; undefined for a sequence that ends in padding.
        """

    @abstractmethod
    def distribution(self, state: State) -> Tensor:
        """log P of every next word, shape [B, V]."""

    @abstractmethod
    def next_words(self, state: State, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable next words, shape [B, k], most probable first, and their log-probabilities."""

    @abstractmethod
    def draw(self, state: State, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, State]:
        """A next word drawn at random for each sequence, shape [B], and the state after it."""

    def loss(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """The mean of -log P (nats) over the words without padding, and the state after them."""
        log_probs, state = self.log_prob(words, state)
        return -log_probs.sum() / (words != PADDING).sum().clamp(min=1), state

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """`loss`, for wrappers that call the module, such as DistributedDataParallel."""
        return self.loss(words, state)

    def advance(self, state: State, words: Tensor) -> State:
        """The state after one more word of each sequence, shape [B]."""
        return self.log_prob(words[:, None], state)[1]

    @torch.no_grad()
    def perplexity(self, words: Tensor, state: State | None = None) -> float:
        """exp of the mean of -log P over the words without padding; call `eval()` before."""
        return math.exp(float(self.loss(words, state)[0]))
