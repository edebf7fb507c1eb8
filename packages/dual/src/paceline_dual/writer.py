# SPDX-License-Identifier: Apache-2.0
"""The decoder of a Transformer: log-probabilities of sequences, and generation symbol by symbol.

One extra symbol, number `words`, is the beginning at the input and the end at the output.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline_dual import search
from paceline_dual.layers import Block, embed, embedding, linear, positions
from paceline_dual.sequences import mask

Projected = tuple[Tensor, Tensor]


class Writer(nn.Module):
    """Blocks that attend to earlier symbols and, if there is one, to a memory; or add a vector of the sequence."""

    def __init__(
        self, words: int, dimension: int, layers: int, heads: int, dropout: float, longest: int, *, cross: bool
    ) -> None:
        super().__init__()
        self.words, self.longest, self.heads = words, longest, heads
        self.embedding = embedding(words + 1, dimension)
        self.blocks = nn.ModuleList(Block(dimension, heads, dropout, cross=cross) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(dimension), linear(dimension, words + 1)
        self.dropout = nn.Dropout(dropout)

    def project(self, memory: Tensor) -> list[Projected]:
        """The memory [B, S, d] as each block's keys and values."""
        return [block.cross.project(memory) for block in self.blocks]  # type: ignore[operator, union-attr]

    def log_prob(
        self,
        y: Tensor,
        projected: list[Projected] | None = None,
        seen: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Tensor:
        """log P [B] of checked sequences y [B, T], their end included, which is certain after `longest` symbols.

        Args:
            y: without columns of padding.
            projected: see `project`; of a memory [B, S, d].
            seen: which of the memory's vectors count, [B, 1, 1, S].
            also: a vector for each sequence, [B, d], which each position gets.
        """
        there = mask(y)
        inputs = F.pad(y.masked_fill(~there, self.words), (1, 0), value=self.words)[:, : self.longest]
        h = embed(self.embedding, inputs)
        h = self.dropout(h if also is None else h + also[:, None])
        for number, block in enumerate(self.blocks):
            h = block(h, seen, None if projected is None else projected[number], causal=True)
        targets = F.pad(y.masked_fill(~there, self.words), (0, 1), value=self.words)[:, : self.longest]
        asked = F.pad(there, (1, 0), value=True)[:, : self.longest]  # each symbol, and the end after the last one
        losses = F.cross_entropy(self.logits(h).flatten(0, 1), targets.flatten(), reduction="none")
        return -losses.view_as(targets).masked_fill(~asked, 0.0).sum(1)

    def logits(self, h: Tensor) -> Tensor:
        """[..., words + 1] of [..., d], in single precision at least."""
        logits: Tensor = self.out(self.norm(h))
        return logits if logits.dtype == torch.float64 else logits.float()

    def steps(
        self,
        inputs: int,
        k: int,
        projected: list[Projected] | None = None,
        seen: Tensor | None = None,
        also: Tensor | None = None,
    ) -> Writing:
        """Begin to write k sequences for each input; the arguments are those of `log_prob`."""
        return Writing(self, inputs, k, projected, seen, also)


class Writing(search.Steps):
    """k unfinished sequences for each input, with a cache of their keys and values.

    The memory's keys and values are stored once for each input, not k times: the k sequences share them.
    """

    def __init__(
        self,
        writer: Writer,
        inputs: int,
        k: int,
        projected: list[Projected] | None,
        seen: Tensor | None,
        also: Tensor | None,
    ) -> None:
        self.writer, self.k, self.t = writer, k, 0
        self.words, self.longest = writer.words, writer.longest
        self.projected, self.seen, self.also = projected, seen, also
        weight = writer.embedding.weight
        self.positions = positions(writer.longest, weight.shape[1], weight)
        room = (inputs * k, writer.heads, writer.longest, weight.shape[1] // writer.heads)
        self.cache = [(weight.new_empty(room), weight.new_empty(room)) for _ in writer.blocks]

    def step(self, last: Tensor) -> Tensor:
        """See `Steps.step`."""
        writer = self.writer
        h = writer.embedding(last) * math.sqrt(writer.embedding.embedding_dim) + self.positions[self.t]
        h = h if self.also is None else h + self.also[:, None]
        for number, block in enumerate(writer.blocks):
            projected = None if self.projected is None else self.projected[number]
            h = block.step(h, self.cache[number], self.t, self.seen, projected)  # type: ignore[operator]
        self.t += 1
        return writer.logits(h).log_softmax(-1)

    def reorder(self, rows: Tensor) -> None:
        """See `Steps.reorder`."""
        first = torch.arange(rows.shape[0], device=rows.device)[:, None] * self.k
        order = (first + rows).flatten()
        for pair in self.cache:
            for kept in pair:
                kept[:, :, : self.t] = kept[:, :, : self.t].index_select(0, order)

    def keep(self, inputs: Tensor) -> None:
        """See `Steps.keep`."""
        order = (inputs[:, None] * self.k + torch.arange(self.k, device=inputs.device)).flatten()
        self.cache = [(self._chosen(keys, order), self._chosen(values, order)) for keys, values in self.cache]
        if self.projected is not None:
            self.projected = [(keys[inputs], values[inputs]) for keys, values in self.projected]
        self.seen = None if self.seen is None else self.seen[inputs]
        self.also = None if self.also is None else self.also[inputs]

    def _chosen(self, kept: Tensor, order: Tensor) -> Tensor:
        """These rows; only written positions are copied."""
        room = kept.new_empty(len(order), *kept.shape[1:])
        room[:, :, : self.t] = kept[:, :, : self.t].index_select(0, order)
        return room
