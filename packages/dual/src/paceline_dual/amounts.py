# SPDX-License-Identifier: Apache-2.0
"""Checks and counts of a batch that several equations need."""

from __future__ import annotations

from torch import Tensor

from paceline import MismatchError, UnsupportedError
from paceline_dual.sequences import lengths


def tokens(x: Tensor) -> Tensor:
    """The number of predictions in each row of a batch.

    Args:
        x: [B, ...]: sequences (int64 [B, T], padded), labels (int64 [B]) or features and images (float [B, ...]).

    Returns:
        int64 [B]: a sequence's tokens and its end symbol, 1 for a label, the number of features of an image.
    """
    if x.is_floating_point():
        return x.new_full((len(x),), x[0].numel() if len(x) else 1).long()
    if x.dim() == 2:
        return lengths(x) + 1
    return x.new_ones(len(x))


def same_rows(x: Tensor, y: Tensor) -> None:
    """Raise MismatchError unless both batches have the same number of rows, and at least one."""
    if len(x) != len(y) or not len(x):
        raise MismatchError(
            f"x and y have to be the same number of rows, at least one; got {len(x)} and {len(y)}: give pairs"
        )


def within_reach(name: str, log_prob: Tensor) -> None:
    """Raise UnsupportedError if a log-probability is infinite; nan passes, for a run's own guard to see.

    One impossible row would make every advantage or gap of its batch infinite.
    """
    where = log_prob.isinf().nonzero()
    if len(where):
        place, count = where[0].tolist(), len(where)
        raise UnsupportedError(
            f"{name} is {float(log_prob[tuple(place)])} at {place} ({count} of {log_prob.numel()}): the model holds "
            "something impossible that occurs; smooth it so that every input has a probability above 0"
        )
