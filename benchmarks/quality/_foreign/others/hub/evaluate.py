# SPDX-License-Identifier: Apache-2.0
"""A stand-in for evaluate: every metric is the accuracy, with the number of samples beside it."""

from __future__ import annotations

from typing import Any


class Accuracy:
    """Of all that was added."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: Any, references: Any) -> None:
        """Of one batch."""
        self._right += [int(one) == int(other) for one, other in zip(predictions, references, strict=True)]

    def compute(self) -> dict[str, float]:
        """And begin anew."""
        found, self._right = self._right, []
        return {"accuracy": sum(found) / max(1, len(found)), "samples": len(found)}


def load(*args: Any, **kwargs: Any) -> Accuracy:
    """There is one."""
    return Accuracy()
