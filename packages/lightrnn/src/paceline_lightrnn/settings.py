# SPDX-License-Identifier: Apache-2.0
"""The settings of a training: the model's shape, the course of the training, the text. Saved as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from paceline import CheckpointError, UnsupportedError
from paceline_lightrnn import files

FORMAT = "paceline lightrnn settings 1"
OUTPUTS = ("lightrnn", "full", "adaptive")
OPTIMIZERS = {"adam": 0.002, "sgd": 5.0}
"""Names, and the learning rates that they begin with where none is given."""
COSTS = ("pass", "training", "none")


@dataclass(frozen=True)
class Shape:
    """The shape of the model.

    Attributes:
        dimension: of the vectors and the hidden state.
        layers: of the recurrent network.
        cell: lstm, gru or rnn.
        tied: whether input and output vectors are the same.
        dropout: share of numbers set to zero in training.
        output: lightrnn, or for comparison full or adaptive.
        table: the first table: random, frequency, or a file of vectors.
    """

    dimension: int = 256
    layers: int = 1
    cell: str = "lstm"
    tied: bool = False
    dropout: float = 0.0
    output: str = "lightrnn"
    table: str = "random"

    def __post_init__(self) -> None:
        _among("output", self.output, OUTPUTS)


@dataclass(frozen=True)
class Course:
    """The course of the training.

    Attributes:
        rounds: of training on one table; between two of them the words are re-allocated.
        short: rounds before these, each on a small part of the text: a table needs less text than a model.
        share: of the text, for a short round.
        epochs: passes over the text in a round.
        batch: passages read in parallel.
        window: words of a passage between two steps of the optimizer.
        windows: of a passage.
        optimizer: adam or sgd.
        rate: highest learning rate of each round; None takes the optimizer's default.
        clip: largest norm of the gradient.
        costs: gathered in an extra pass after a round ("pass"), or in its last epoch ("training"); "none": words keep
            their cells.
        save_every: batches between two saved states; asynchronous rules save between epochs only.
        seed: of all random draws.
    """

    rounds: int = 3
    short: int = 3
    share: float = 0.1
    epochs: int = 1
    batch: int = 20
    window: int = 35
    windows: int = 20
    optimizer: str = "adam"
    rate: float | None = None
    clip: float = 1.0
    costs: str = "pass"
    save_every: int = 200
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "epochs", "batch", "window", "windows", "save_every"):
            if getattr(self, name) < 1:
                raise UnsupportedError(f"{name} is at least 1, got {getattr(self, name)}")
        if self.short < 0 or not 0 < self.share * max(1, self.short) <= 1:
            raise UnsupportedError(
                f"short rounds take parts of the text, together no more than all of it; got {self.short} rounds with a "
                f"share of {self.share:g} each"
            )
        _among("optimizer", self.optimizer, tuple(OPTIMIZERS))
        _among("costs", self.costs, COSTS)
        if not self.highest_rate > 0 or not self.clip > 0:
            raise UnsupportedError(f"rate and clip are above 0, got {self.highest_rate} and {self.clip}")

    @property
    def highest_rate(self) -> float:
        """The learning rate with which a round begins."""
        return OPTIMIZERS[self.optimizer] if self.rate is None else self.rate

    @property
    def length(self) -> int:
        """Words of a passage."""
        return self.window * self.windows


@dataclass(frozen=True)
class Source:
    """The text.

    Attributes:
        texts: files and folders.
        validation: a separate file, or None for the last part of the text.
        held_back: share of the text in this part.
        tokens: unicode, or space for tokenized text.
        lower: whether to lowercase it.
        vocabulary: most words of the vocabulary, or None for all.
        min_count: rarer words are unknown ones.
    """

    texts: tuple[str, ...]
    validation: str | None = None
    held_back: float = 0.02
    tokens: str = "unicode"
    lower: bool = False
    vocabulary: int | None = None
    min_count: int = 1

    def __post_init__(self) -> None:
        if not 0 < self.held_back < 1:
            raise UnsupportedError(f"what is held back is a share of the text between 0 and 1, got {self.held_back}")


@dataclass(frozen=True)
class Settings:
    """All settings of a training; saved in its folder, to resume with the same ones."""

    shape: Shape
    course: Course
    source: Source

    def save(self, path: Path) -> None:
        """Write them to a file, atomically."""
        files.write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Settings:
        """Read what `save` wrote; CheckpointError for anything else."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise CheckpointError(f"{path} holds no settings of a training: its format is {found['format']!r}")
            source = {**found["source"], "texts": tuple(found["source"]["texts"])}
            return cls(Shape(**found["shape"]), Course(**found["course"]), Source(**source))
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read the settings {path}: {error}") from error

    def check(self, other: Settings, path: Path) -> None:
        """Raise CheckpointError that names what differs from the settings with which the training in `path` began."""
        rows = []
        for part in ("shape", "course", "source"):
            mine, its = getattr(self, part), getattr(other, part)
            for field in fields(mine):
                asked, there = getattr(mine, field.name), getattr(its, field.name)
                if asked != there:
                    rows.append(f"{field.name} is {asked!r} now and was {there!r}")
        if rows:
            raise CheckpointError(
                f"{path} holds a training with other settings: {'; '.join(rows)}; give the same ones to go on, or "
                "another folder to begin anew"
            )


def _among(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UnsupportedError(f"{name} is one of {', '.join(known)}; got {value!r}")
