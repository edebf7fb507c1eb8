# SPDX-License-Identifier: Apache-2.0
"""The parts of a small Transformer: attention, blocks, an encoder.

Pre-norm (Xiong et al., ICML 2020): h = h + part(norm(h)), so that it learns without a warm-up of the rate. Positions
are sinusoids (Vaswani et al., NIPS 2017, section 3.5), which have no parameters and no longest length. Dropout is on
the embeddings, on what each part adds and in the feed-forward part, not on the attention's weights: there it would
cost several times the attention itself on a CPU.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import UnsupportedError
from paceline_dual.sequences import mask

WIDER = 4  # the feed-forward part's inner dimension, in dimensions of the model


class SelfAttention(nn.Module):
    """Each position attends to its sequence, or, if `causal`, to itself and earlier positions."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.inputs = linear(dimension, 3 * dimension)
        self.out = linear(dimension, dimension)

    def forward(self, h: Tensor, seen: Tensor | None, *, causal: bool) -> Tensor:
        """[B, T, d] of [B, T, d]; `seen` [B, 1, 1, T] is the attention mask, None for all."""
        query, key, value = (split(part, self.heads) for part in self.inputs(h).chunk(3, -1))
        out: Tensor = self.out(join(F.scaled_dot_product_attention(query, key, value, seen, is_causal=causal)))
        return out

    def step(self, h: Tensor, keys: Tensor, values: Tensor, t: int) -> Tensor:
        """[B, k, d] of position t alone; keys and values [B * k, heads, longest, d / heads] are filled up to t - 1."""
        batch, k, dimension = h.shape
        query, key, value = self.inputs(h).view(batch * k, 3, self.heads, 1, dimension // self.heads).unbind(1)
        keys[:, :, t : t + 1], values[:, :, t : t + 1] = key, value
        scores = query @ keys[:, :, : t + 1].mT / math.sqrt(query.shape[-1])
        mixed = scores.softmax(-1) @ values[:, :, : t + 1]
        out: Tensor = self.out(mixed.reshape(batch, k, dimension))
        return out


class CrossAttention(nn.Module):
    """Each position attends to an encoded sequence, the memory."""

    def __init__(self, dimension: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = linear(dimension, dimension)
        self.memory = linear(dimension, 2 * dimension)
        self.out = linear(dimension, dimension)

    def project(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B, heads, S, d / heads] of a memory [B, S, d]."""
        key, value = (split(part, self.heads) for part in self.memory(memory).chunk(2, -1))
        return key, value

    def forward(self, h: Tensor, projected: tuple[Tensor, Tensor], seen: Tensor | None) -> Tensor:
        """[B, n, d] of [B, n, d], for n positions of one sequence or n sequences of one input."""
        query = split(self.query(h), self.heads)
        out: Tensor = self.out(join(F.scaled_dot_product_attention(query, *projected, seen)))
        return out


class Block(nn.Module):
    """Self-attention, cross-attention if there is a memory, feed-forward; each with a residual connection."""

    def __init__(self, dimension: int, heads: int, dropout: float, *, cross: bool = False) -> None:
        super().__init__()
        self.attention, self.attention_norm = SelfAttention(dimension, heads), nn.LayerNorm(dimension)
        self.cross = CrossAttention(dimension, heads) if cross else None
        self.cross_norm = nn.LayerNorm(dimension) if cross else None
        self.wide, self.narrow = linear(dimension, WIDER * dimension), linear(WIDER * dimension, dimension)
        self.forward_norm = nn.LayerNorm(dimension)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        h: Tensor,
        seen: Tensor | None = None,
        projected: tuple[Tensor, Tensor] | None = None,
        *,
        causal: bool = False,
    ) -> Tensor:
        """[B, T, d] of [B, T, d]; `seen` is the mask of the memory if there is one, else of the positions."""
        own = None if projected is not None else seen
        h = h + self.dropout(self.attention(self.attention_norm(h), own, causal=causal))
        return self.rest(h, seen, projected)

    def step(
        self,
        h: Tensor,
        cache: tuple[Tensor, Tensor],
        t: int,
        seen: Tensor | None,
        projected: tuple[Tensor, Tensor] | None,
    ) -> Tensor:
        """[B, k, d] of position t of k sequences for each input, [B, k, d]; see `SelfAttention.step`."""
        h = h + self.attention.step(self.attention_norm(h), *cache, t)
        return self.rest(h, seen, projected)

    def rest(self, h: Tensor, seen: Tensor | None, projected: tuple[Tensor, Tensor] | None) -> Tensor:
        """Cross-attention and feed-forward."""
        if self.cross is not None and self.cross_norm is not None and projected is not None:
            h = h + self.dropout(self.cross(self.cross_norm(h), projected, seen))
        inner = self.dropout(F.relu(self.wide(self.forward_norm(h))))
        result: Tensor = h + self.dropout(self.narrow(inner))
        return result


class Encoder(nn.Module):
    """Encodes sequences. An end symbol is added, so that none is empty."""

    def __init__(self, words: int, dimension: int, layers: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.words = words
        self.embedding = embedding(words + 1, dimension)
        self.blocks = nn.ModuleList(Block(dimension, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(dimension)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Vectors [B, T + 1, d] of sequences [B, T], and which of them count: [B, 1, 1, T + 1], None for all."""
        there = F.pad(mask(x), (1, 0), value=True)  # the end's vector is first, a place that every length has
        h = embed(self.embedding, F.pad(x, (1, 0), value=self.words).masked_fill(~there, self.words))
        h = self.dropout(h)
        seen = None if bool(there.all()) else there[:, None, None]
        for block in self.blocks:
            h = block(h, seen)
        return self.norm(h), seen


def embed(table: nn.Embedding, symbols: Tensor) -> Tensor:
    """Vectors and positions of symbols [B, T]: [B, T, d]."""
    dimension = table.embedding_dim
    h: Tensor = table(symbols) * math.sqrt(dimension)
    return h + positions(symbols.shape[1], dimension, h)


def positions(count: int, dimension: int, like: Tensor) -> Tensor:
    """Sinusoids [count, d]: sines of wavelengths from 2 pi to 10,000 * 2 pi, then their cosines."""
    rates = torch.exp(torch.arange(0, dimension, 2, device=like.device) * (-math.log(10_000.0) / dimension))
    angles = torch.arange(count, device=like.device)[:, None] * rates
    return torch.cat((angles.sin(), angles.cos()), 1).to(like.dtype)


def split(h: Tensor, heads: int) -> Tensor:
    """[B, T, d] -> [B, heads, T, d / heads]."""
    return h.view(*h.shape[:2], heads, h.shape[2] // heads).transpose(1, 2)


def join(h: Tensor) -> Tensor:
    """[B, heads, T, d / heads] -> [B, T, d]."""
    return h.transpose(1, 2).flatten(2)


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A linear layer with Glorot's uniform weights and zero bias."""
    layer = nn.Linear(inputs, outputs)
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def embedding(symbols: int, dimension: int) -> nn.Embedding:
    """Vectors of length about 1; `embed` scales them to the positions."""
    table = nn.Embedding(symbols, dimension)
    nn.init.normal_(table.weight, std=dimension**-0.5)
    return table


def check_sizes(dimension: int, layers: int, heads: int, dropout: float, **counts: int) -> None:
    """Raise UnsupportedError if no Transformer has these sizes."""
    for name, count in {"layers": layers, "heads": heads, **counts}.items():
        if count < 1:
            raise UnsupportedError(f"{name} is {count}; it takes 1 at least")
    if dimension < 2 or dimension % (2 * heads):
        raise UnsupportedError(
            f"dimension is {dimension} and heads {heads}; every head takes an equal, even share: make it a multiple of "
            f"{2 * heads}"
        )
    if not 0 <= dropout < 1:
        raise UnsupportedError(f"dropout is {dropout}; it is a share from 0 to less than 1")
