# SPDX-License-Identifier: Apache-2.0
"""Sequences of symbols as tensors: int64 [B, T], symbols from 0 on, padded with -1 at the end only.

They hold neither a begin nor an end symbol: models add both. T may differ from call to call; a row of padding is an
empty sequence. Functions of [B, T] take [B, k, T] as well unless they say otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline import MismatchError

PADDING = -1


def mask(x: Tensor) -> Tensor:
    """Where there is a symbol: bool, of the same shape."""
    return x != PADDING


def lengths(x: Tensor) -> Tensor:
    """Number of symbols of each sequence, int64, [B, T] -> [B]."""
    return mask(x).sum(-1)


def pad(sequences: Sequence[Sequence[int]]) -> Tensor:
    """Lists of symbols as one tensor [B, T], T the longest one's length.

    Raises:
        MismatchError: a symbol is negative.
    """
    longest = max((len(sequence) for sequence in sequences), default=0)
    rows = [[*sequence, *[PADDING] * (longest - len(sequence))] for sequence in sequences]
    for row, sequence in enumerate(sequences):
        if min(sequence, default=0) < 0:
            raise MismatchError(f"sequence {row} has the symbol {min(sequence)}; symbols count from 0")
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), longest)


def unpad(x: Tensor) -> list[list[int]]:
    """The symbols of each row of [B, T], without padding."""
    check(x)
    return [[symbol for symbol in row if symbol != PADDING] for row in x.tolist()]


def trim(x: Tensor) -> Tensor:
    """The same sequences without the columns in which all are padding; also of [B, k, T]."""
    if not x.numel():
        return x[..., :0]
    used = mask(x).reshape(-1, x.shape[-1]).any(0)
    return x[..., : int((used * torch.arange(1, len(used) + 1, device=x.device)).max())]


def same_width(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors [..., T] padded at the end to the largest T among them."""
    width = max((tensor.shape[-1] for tensor in tensors), default=0)
    return [torch.nn.functional.pad(tensor, (0, width - tensor.shape[-1]), value=PADDING) for tensor in tensors]


def check(x: Tensor, words: int | None = None, longest: int | None = None, name: str = "sequences") -> Tensor:
    """The sequences [B, T] without columns of padding, checked for a model of `words` symbols.

    Raises:
        MismatchError: wrong type or shape, an unknown symbol, padding before a symbol, or a sequence that is too long.
    """
    if x.dtype != torch.int64 or x.dim() != 2:
        raise MismatchError(f"{name} are int64 [B, T], padded with {PADDING}; got {x.dtype} {list(x.shape)}")
    x = trim(x)
    if not x.numel():
        return x
    low, high = (int(bound) for bound in x.aminmax())
    if low < PADDING or (words is not None and high >= words):
        seen = low if low < PADDING else high
        allowed = "counts from 0" if words is None else f"is from 0 to {words - 1}"
        raise MismatchError(f"{name} have the symbol {seen}; a symbol {allowed}, padding is {PADDING}")
    if ((x[:, :-1] == PADDING) & (x[:, 1:] != PADDING)).any():
        raise MismatchError(f"{name} have padding before a symbol; padding ({PADDING}) comes at the end only")
    if longest is not None and x.shape[1] > longest:
        raise MismatchError(
            f"{name} have {x.shape[1]} symbols, this model writes {longest} at most; shorten them or make the model "
            f"with longest={x.shape[1]}"
        )
    return x


def check_pairs(y: Tensor, x: Tensor) -> None:
    """Raises MismatchError if there are not as many y as x."""
    if y.shape[:1] != x.shape[:1]:
        raise MismatchError(f"log_prob takes one y for each x; got {list(y.shape)} and {list(x.shape)}")


def check_count(k: int, most: int | None = None) -> int:
    """k, the number of samples or candidates for each x; MismatchError if it is out of range."""
    if k < 1 or (most is not None and k > most):
        limit = "" if most is None else f" and at most {most}"
        raise MismatchError(f"k is the number of samples or candidates for each x, at least 1{limit}; got {k}")
    return k
