# SPDX-License-Identifier: Apache-2.0
"""What the workers' books say: which samples are in the model, and when exchanges were over."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from _faults.job import LAPS

Books = dict[int, list[dict[str, Any]]]


@dataclass
class Exchange:
    """One exchange, as the survivors saw it.

    Attributes:
        number: 1, 2, ...
        share: 1 / M, of M minibatches that are in it.
        brought: worker's place -> (its last minibatch in it, how many of them).
        arrived: worker -> when it came; those who looked behind just this exchange only.
        over: worker -> when it went on.
    """

    number: int
    share: float = 0.0
    brought: dict[int, tuple[int, int]] = field(default_factory=dict)
    arrived: dict[int, float] = field(default_factory=dict)
    over: dict[int, float] = field(default_factory=dict)

    @property
    def last_arrival(self) -> float:
        """When the last of those who were in it came."""
        return max(self.arrived.values())

    @property
    def done(self) -> float:
        """When all of them went on."""
        return max(self.over.values())


def exchanges(books: Books) -> dict[int, Exchange]:
    """All exchanges that anybody has seen.

    A worker that looks after several exchanges has seen all of them: each has its own places in the buffer.

    Raises:
        SystemExit: two workers saw different things, or an exchange's shares do not add up.
    """
    found: dict[int, Exchange] = {}
    for worker, lines in books.items():
        came = 0.0
        for line in lines:
            if line["event"] == "step":
                came = line["at"]
            elif line["event"] == "exchanged":
                _see(found, worker, line, came)
    for one in found.values():
        _check(one)
    return found


def _see(found: dict[int, Exchange], worker: int, line: dict[str, Any], came: float) -> None:
    numbers = range(line["first"], line["last"] + 1)
    if len(numbers) > LAPS:
        raise SystemExit(f"worker {worker} looked after {len(numbers)} exchanges; its book tells {LAPS}")
    for number in numbers:
        one = found.setdefault(number, Exchange(number))
        rows = [row for row in line["added"] if row[0] == number % LAPS]
        brought = {int(w): (round(steps / share), round(made / share)) for _, w, share, steps, made in rows}
        if one.brought and brought and one.brought != brought:
            raise SystemExit(f"exchange {number}: one worker saw {one.brought}, worker {worker} saw {brought}")
        if brought:
            one.brought, one.share = brought, rows[0][2]
        if len(numbers) == 1:
            one.arrived[worker], one.over[worker] = came, line["at"]


def _check(one: Exchange) -> None:
    made = sum(count for _, count in one.brought.values())
    if one.brought and abs(made * one.share - 1) > 1e-6:
        raise SystemExit(
            f"exchange {one.number}: {made} minibatches are in it by the book, {1 / one.share:.3f} by the mean"
        )


def samples(books: Books, found: dict[int, Exchange], total: int) -> dict[str, int]:
    """Samples that are in the model less or more often than once, and the minibatches that are in it."""
    last = max(found, default=0)
    unseen = sorted(set(range(1, last + 1)) - found.keys())
    if unseen:
        raise SystemExit(f"nobody has written down exchanges {unseen}")
    ids = {w: {line["step"]: line["ids"] for line in lines if line["event"] == "step"} for w, lines in books.items()}
    counts: Counter[int] = Counter()
    for one in found.values():
        for worker, (step, made) in one.brought.items():
            for number in range(step - made + 1, step + 1):
                counts.update(ids[worker][number])
    lost = sum(counts[k] == 0 for k in range(total))
    repeated = sum(count - 1 for count in counts.values() if count > 1)
    merged = sum(made for one in found.values() for _, made in one.brought.values())
    computed = sum(len(steps) for steps in ids.values())
    return {"lost": lost, "repeated": repeated, "merged": merged, "computed": computed, "exchanges": last}


def digests(books: Books) -> dict[int, str]:
    """Of the final models of all who came to the end."""
    return {w: line["digest"] for w, lines in books.items() for line in lines if line["event"] == "ended"}
