# SPDX-License-Identifier: Apache-2.0
"""The content of a report of a pair's training: numbers and translations, without the page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline import CheckpointError
from paceline_dual.pair import DIRECTIONS
from paceline_dual.training import HISTORY, WORDS
from paceline_dual.words import Words

SIDES = {"forward": ("x", "y"), "backward": ("y", "x")}
NUMBERS = ("step", "forward", "backward", "prior_x", "prior_y", "gap", "gap_rms", "seconds")
NEEDED = (*NUMBERS, "phase", "exact_forward", "exact_backward", "rewards", "translations")
Row = dict[str, Any]


@dataclass(frozen=True)
class History:
    """The history of a training so far.

    Attributes:
        rows: of all evaluations, at least one; see `train`.
        method: of the course.
        warm: steps of the warm-up.
        steps: of the whole training.
        over: whether it has ended.
        workers: number of workers.
        rule: of the workers.
    """

    rows: list[Row]
    method: str
    warm: int
    steps: int
    over: bool
    workers: int
    rule: str

    @classmethod
    def load(cls, folder: Path) -> History:
        """Read it; CheckpointError if it is missing or damaged."""
        path = folder / HISTORY
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            rows = list(found["rows"])
            if not rows or not all(_is_row(row) for row in rows):
                raise CheckpointError(f"{path} is no history of a training of a pair; give the folder of one")
            numbers = (int(found["warm"]), int(found["steps"]), bool(found["over"]), int(found["workers"]))
            return cls(rows, str(found["method"]), *numbers, rule=str(found["rule"]))
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}; has a training of a pair begun there?") from error

    @property
    def start(self) -> Row:
        """The row of the warm start: the last one before unlabelled data."""
        return next((row for row in reversed(self.rows) if row["step"] <= self.warm), self.rows[0])


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or any(name not in row for name in NEEDED):
        return False
    return all(isinstance(row[name], (int, float)) for name in NUMBERS)


def words_of(folder: Path, given: Path | None = None) -> Words:
    """The words of a file, else those of the training, else none; CheckpointError if they are damaged."""
    path = folder / WORDS if given is None else given
    return Words() if given is None and not path.is_file() else Words.load(path)


@dataclass(frozen=True)
class Attempt:
    """A model's output for a source, equal at consecutive evaluations.

    Attributes:
        first: step of the first of them.
        last: step of the last.
        output: as text.
        right: whether it equals the reference.
        r1: log P of the output by the prior, at the last of them.
        r2: log P of the source given the output, by the other model.
        r: the reward.
    """

    first: int
    last: int
    output: str
    right: bool
    r1: float
    r2: float
    r: float


@dataclass(frozen=True)
class Translation:
    """The outputs for one held-out source, evaluation by evaluation.

    Attributes:
        direction: forward or backward.
        source: as text.
        reference: as text.
        attempts: in order.
    """

    direction: str
    source: str
    reference: str
    attempts: tuple[Attempt, ...]


def translations(history: History, words: Words) -> list[Translation]:
    """The samples of all evaluations, grouped by source and direction, forward first."""
    groups: dict[tuple[str, int], list[tuple[int, Row]]] = {}
    for row in history.rows:
        places = dict.fromkeys(DIRECTIONS, 0)
        for one in row["translations"]:
            name = one["direction"]
            groups.setdefault((name, places[name]), []).append((row["step"], one))
            places[name] += 1
    order = sorted(groups, key=lambda key: (DIRECTIONS.index(key[0]), key[1]))
    return [_translation(name, groups[name, place], words) for name, place in order]


def _translation(direction: str, rows: list[tuple[int, Row]], words: Words) -> Translation:
    source, target = SIDES[direction]
    attempts: list[Attempt] = []
    for step, one in rows:
        output, right = words.text(target, one["output"]), one["output"] == one["reference"]
        first = step
        if attempts and attempts[-1].output == output:
            first = attempts.pop().first
        attempts.append(Attempt(first, step, output, right, one["r1"], one["r2"], one["r"]))
    about = rows[-1][1]
    texts = words.text(source, about["source"]), words.text(target, about["reference"])
    return Translation(direction, *texts, attempts=tuple(attempts))


def warnings(history: History) -> list[str]:
    """Warnings for the reader of a report."""
    found = (
        [] if history.over else [f"The training is not over: step {history.rows[-1]['step']:,} of {history.steps:,}."]
    )
    start, last = history.start, history.rows[-1]
    if last["step"] <= history.warm:
        return found
    for name, what in (("forward", "P(y | x)"), ("backward", "P(x | y)")):
        if not last[name] >= start[name]:
            found.append(
                f"The {name} model's mean log {what} of held-out pairs is {last[name]:.4g}, below the "
                f"{start[name]:.4g} of the warm start."
            )
        earlier = [row for row in history.rows if row["step"] > history.warm and row["rewards"][name]]
        if len(earlier) > 1 and _fell(earlier, name):
            found.append(
                f"From step {earlier[0]['step']:,} to the end the mean reward of the {name} direction rose and the "
                "share of right outputs fell: the reward may be got without translating; look at the samples, and at "
                "alpha."
            )
    return found


def _fell(rows: list[Row], name: str) -> bool:
    first, last = rows[0], rows[-1]
    exact = f"exact_{name}"
    if first[exact] is None or last[exact] is None:
        return False
    return bool(last["rewards"][name]["r"] > first["rewards"][name]["r"] and last[exact] < first[exact])
