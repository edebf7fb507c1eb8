# SPDX-License-Identifier: Apache-2.0
"""The held-out loss that a program logs, on one worker: `run.log(held_out=loss)`, `run.log(val_loss=loss)`.

A name counts if one of its words is held (of held_out), val, valid, validation, dev, eval, evaluation or test, and all
the others are out, loss, losses, nll, error or errors. So `val_loss`, `held_out` and `validation/loss` count,
`val_accuracy` and `loss` do not: the training loss of a worker is that of its own model, and in a first epoch falls
with what it has seen.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

HELD_OUT = {"held", "heldout", "val", "valid", "validation", "dev", "eval", "evaluation", "test"}
LOSS = {"out", "loss", "losses", "nll", "error", "errors"}

Row = tuple[int, float | None, float]
"""(M, the loss or None where it is no finite number above 0, the learning rate)."""


def is_held_out(name: str) -> bool:
    """Whether a value of this name is a held-out loss.

    >>> [is_held_out(name) for name in ("val_loss", "held_out", "loss", "val_accuracy")]
    [True, True, False, False]
    """
    words = set(re.split(r"[^a-z]+", name.lower())) - {""}
    return bool(words & HELD_OUT) and words <= HELD_OUT | LOSS


class HeldOutLog:
    """What this worker has logged and not yet told the others.

    Args:
        workers: N.

    Attributes:
        workers: N at present.
        made: M, minibatches of all workers, taken for N at each step of this worker.
    """

    def __init__(self, workers: int) -> None:
        self.workers, self.made = workers, 0
        self._steps = self._said = 0  # the last step; so many values were told
        self._new: dict[str, list[Row]] = {}

    def stepped(self, steps: int) -> None:
        """This worker has made `steps` minibatches."""
        self.made += self.workers if steps != self._steps else 0
        self._steps = steps

    def logged(self, values: Mapping[str, float], rate: float) -> None:
        """The program has logged these values, at this learning rate."""
        for name, value in values.items():
            if is_held_out(name):
                good = math.isfinite(value) and value > 0
                self._new.setdefault(name, []).append((self.made, value if good else None, rate))

    @property
    def waits(self) -> bool:
        """Whether there is something to tell."""
        return bool(self._new)

    def said(self) -> list[Any]:
        """[M, name -> rows] as JSON values; the same again until `heard`."""
        self._said = sum(map(len, self._new.values()))
        return [self.made, {name: [list(row) for row in rows] for name, rows in self._new.items()}]

    def heard(self) -> None:
        """All workers have what `said` gave."""
        if self._said:
            self._new = {}
        self._said = 0


def together(said: Sequence[list[Any]], name: str) -> tuple[int, str, list[Row]]:
    """(M, the name, its rows) of all workers.

    Losses of workers that have logged as often as the first are averaged: each may have its part of the held-out data.

    Args:
        said: of each worker.
        name: that was taken before; "" for any.
    """
    made = max(int(row[0]) for row in said)
    known = [name] if name else [one for row in said for one in sorted(row[1])][:1]
    found = [row[1][known[0]] for row in said if known and row[1].get(known[0])]
    alike = [rows for rows in found if len(rows) == len(found[0])]
    return made, known[0] if known else "", [_mean(rows) for rows in zip(*alike, strict=True)]


def _mean(rows: Sequence[Sequence[Any]]) -> Row:
    """One point of several workers."""
    values = [row[1] for row in rows]
    mean = None if None in values else math.fsum(values) / len(values)
    return int(rows[0][0]), mean, float(rows[0][2])
