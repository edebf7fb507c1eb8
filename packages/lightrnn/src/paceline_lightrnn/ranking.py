# SPDX-License-Identifier: Apache-2.0
"""Finds the most probable words of a vocabulary without computing most of it.

A word cannot be more probable than its row: P(w) = P(row) P(column | row) <= P(row). So rows are tried in descending
order of P(row) until the k-th best word is at least as probable as the next row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from paceline import MismatchError
from paceline_lightrnn.table import EMPTY, WordTable

Columns = Callable[[Tensor, Tensor], Tensor]
"""(sequences [n], rows [n]) -> log P [n, C] of the columns, if this sequence's next word lies in this row."""

FIRST_ROWS = 4
AT_ONCE = 1 << 22  # numbers: log-probabilities that are computed at a time


class Ranking(NamedTuple):
    """The best words.

    Attributes:
        words: shape [B, k], most probable first; ties in ascending order.
        log_probs: shape [B, k].
        rows: shape [B]: number of tried rows.
    """

    words: Tensor
    log_probs: Tensor
    rows: Tensor


@torch.no_grad()
def top_words(row_log_probs: Tensor, columns: Columns, table: WordTable, k: int) -> Ranking:
    """The k most probable words of each sequence, exactly.

    Rows are tried in batches that double, from 4 on. Ties at the k-th place are broken arbitrarily.

    Args:
        row_log_probs: shape [B, R], log P(row); minus infinity for empty rows.
        columns: the rest of the model.
        table: the cells of the words.
        k: 1 to V.

    Raises:
        MismatchError: there are no k words.
    """
    if not 1 <= k <= table.words:
        raise MismatchError(f"k is 1 to the number of words, {table.words}; got {k}")
    batch = row_log_probs.shape[0]
    bounds, order = row_log_probs.sort(dim=1, descending=True)
    words = torch.full((batch, k), EMPTY, device=order.device)
    log_probs = torch.full((batch, k), -float("inf"), dtype=bounds.dtype, device=order.device)
    tried = torch.zeros(batch, dtype=torch.int64, device=order.device)
    done, size = 0, FIRST_ROWS
    waiting = torch.arange(batch, device=order.device)
    while waiting.numel() and done < table.rows:
        size = min(size, max(1, AT_ONCE // (waiting.numel() * table.columns)), table.rows - done)
        rows = order[waiting, done : done + size]
        found = columns(waiting.repeat_interleave(size), rows.flatten()).view(-1, size, table.columns)
        found = (found + bounds[waiting, done : done + size, None]).flatten(1)
        found = found.masked_fill((table.word[rows] == EMPTY).flatten(1), -float("inf"))
        best, places = found.topk(min(k, found.shape[1]), dim=1)
        names = table.word[rows].flatten(1).gather(1, places)
        words[waiting], log_probs[waiting] = _merge(words[waiting], log_probs[waiting], names, best)
        done, size = done + size, 2 * size
        tried[waiting] = done
        if done < table.rows:
            waiting = waiting[log_probs[waiting, -1] < bounds[waiting, done]]
    return Ranking(words, log_probs, tried)


def _merge(words: Tensor, log_probs: Tensor, others: Tensor, their: Tensor) -> tuple[Tensor, Tensor]:
    """The best k of both lists by log-probability, ties in ascending order, empty cells last."""
    k = words.shape[1]
    words, log_probs = torch.cat((words, others), 1), torch.cat((log_probs, their), 1)
    last = torch.iinfo(torch.int64).max
    order = torch.where(words == EMPTY, last, words).argsort(dim=1)
    words, log_probs = words.gather(1, order), log_probs.gather(1, order)
    log_probs, order = log_probs.sort(dim=1, descending=True, stable=True)
    return words.gather(1, order)[:, :k], log_probs[:, :k]
