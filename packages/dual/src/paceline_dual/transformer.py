# SPDX-License-Identifier: Apache-2.0
"""Two small Transformers: one from sequences to sequences, P(y | x), and a language model, P(x).

::

    log P(y | x) = sum over t of log P(y[t] | y[0..t-1], x) + log P(end | y, x)

After `longest` symbols the end is certain, so a sequence of just that length has no term for its end, a longer one is
refused, and the probabilities of all others sum to 1. See :mod:`paceline_dual.search` for sampling and the beam.
"""

from __future__ import annotations

import torch
from torch import Tensor

from paceline_dual import search, storage
from paceline_dual.layers import Encoder, check_sizes
from paceline_dual.protocols import undisturbed
from paceline_dual.sequences import check, check_count, check_pairs
from paceline_dual.writer import Projected, Writer


class Seq2Seq(storage.Saved):
    """P(y | x) of two sequences: an encoder, and a decoder that keeps the keys and values of what it has written.

    Args:
        source_words: number of symbols of x; its end symbol is added inside.
        target_words: number of symbols of y; begin and end are added inside.
        dimension: d, a multiple of twice the heads.
        layers: of the encoder, and as many of the decoder.
        heads: of each attention.
        dropout: share of numbers set to zero in training.
        longest: no y is longer, and no sample or candidate gets longer. x may have any length.

    Raises:
        UnsupportedError: a number makes no sense.
    """

    FORMAT = "paceline dual sequences 1"

    def __init__(
        self,
        source_words: int,
        target_words: int,
        dimension: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        longest: int = 64,
    ) -> None:
        super().__init__()
        check_sizes(
            dimension, layers, heads, dropout, source_words=source_words, target_words=target_words, longest=longest
        )
        self.about = {"source_words": source_words, "target_words": target_words, "dimension": dimension}
        self.about |= {"layers": layers, "heads": heads, "dropout": dropout, "longest": longest}
        self.longest = longest
        self.encoder = Encoder(source_words, dimension, layers, heads, dropout)
        self.writer = Writer(target_words, dimension, layers, heads, dropout, longest, cross=True)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x) [B] of sequences y [B, T] and x [B, S], the end of y included.

        Raises:
            MismatchError: there are not as many y as x, or they are no sequences of these models' symbols.
        """
        check_pairs(y, x)
        y = check(y, self.writer.words, self.longest, "targets y")
        projected, seen = self._read(x)
        return self.writer.log_prob(y, projected, seen)

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """k independent draws from P(. | x) for each x [B, S], [B, k, T]; see `Conditional.sample`."""
        check_count(k)
        with undisturbed(self):
            steps = self.writer.steps(len(x), k, *self._read(x))
            return search.sample(steps, len(x), k, x.device, generator)

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best y of a beam of k for each x [B, S], and log P(y | x); see `search.beam`."""
        check_count(k)
        with undisturbed(self):
            return search.beam(self.writer.steps(len(x), k, *self._read(x)), len(x), k, x.device)

    def _read(self, x: Tensor) -> tuple[list[Projected], Tensor | None]:
        memory, seen = self.encoder(check(x, self.encoder.words, None, "sources x"))
        return self.writer.project(memory), seen


class LanguageModel(storage.Saved):
    """P(x) of sequences: the decoder alone.

    Args:
        words: number of symbols; begin and end are added inside.
        dimension: as the rest, see `Seq2Seq`.

    Raises:
        UnsupportedError: a number makes no sense.
    """

    FORMAT = "paceline dual language 1"

    def __init__(
        self,
        words: int,
        dimension: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        longest: int = 64,
    ) -> None:
        super().__init__()
        check_sizes(dimension, layers, heads, dropout, words=words, longest=longest)
        self.about = {"words": words, "dimension": dimension}
        self.about |= {"layers": layers, "heads": heads, "dropout": dropout, "longest": longest}
        self.longest = longest
        self.writer = Writer(words, dimension, layers, heads, dropout, longest, cross=False)

    def log_prob(self, x: Tensor) -> Tensor:
        """log P(x) [B] of sequences [B, T], their end included; MismatchError if they are none of its symbols."""
        return self.writer.log_prob(check(x, self.writer.words, self.longest, "sequences x"))

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n independent draws, [n, T], without gradient and without dropout."""
        check_count(n)
        with undisturbed(self):
            device = self.writer.embedding.weight.device
            return search.sample(self.writer.steps(n, 1), n, 1, device, generator)[:, 0]
