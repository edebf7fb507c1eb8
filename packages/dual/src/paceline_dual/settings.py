# SPDX-License-Identifier: Apache-2.0
"""The settings of a training of a pair; saved as JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from paceline import CheckpointError, UnsupportedError
from paceline_dual import files
from paceline_dual.learning import Reward
from paceline_dual.supervised import SIDES, ByLength, Duality

FORMAT = "paceline dual course 1"
METHODS = ("dual", "back_translation", "iterative_back_translation", "supervised")
"""Uses of unlabelled data; see :mod:`paceline_dual.methods`."""


@dataclass(frozen=True)
class Rates:
    """Highest learning rates.

    Attributes:
        warm: of both models in the warm-up.
        forward: of P(y | x) after it.
        backward: of P(x | y) after it.
    """

    warm: float = 1e-3
    forward: float = 3e-4
    backward: float = 3e-4

    def __post_init__(self) -> None:
        for one in fields(self):
            if not getattr(self, one.name) > 0:
                raise UnsupportedError(f"the rate {one.name} is above 0, got {getattr(self, one.name)}")


@dataclass(frozen=True)
class Mix:
    """The batches of a step after the warm-up: a labelled one and an unlabelled one.

    The loss is share * (labelled) + (1 - share) * (unlabelled). The share changes linearly from `labelled_from` at the
    first such step to `labelled_to` at the last. It weights losses, not numbers of samples, so that every worker does
    the same work at every step. (He et al., NIPS 2016, mix halves of a batch and anneal the labelled one.)

    Attributes:
        labelled: pairs of a batch, in the warm-up as well.
        unlabelled: samples of a batch, of one side.
        labelled_from: share at the first step.
        labelled_to: share at the last one.
        policy: weight of the policy gradient beside the exact one, under dual learning. Rewards are sums of
            log-probabilities, some ten nats apart, so that at weight 1 sampling noise dominates. The paper has two
            learning rates instead, a factor of 100 apart.
    """

    labelled: int = 64
    unlabelled: int = 32
    labelled_from: float = 0.5
    labelled_to: float = 0.5
    policy: float = 0.03

    def __post_init__(self) -> None:
        _at_least_1(self, ("labelled", "unlabelled"))
        if not 0 <= self.policy < math.inf:
            raise UnsupportedError(f"policy is a weight, 0 or more, got {self.policy}")
        for name in ("labelled_from", "labelled_to"):
            if not 0 <= getattr(self, name) <= 1:
                raise UnsupportedError(f"{name} is a share between 0 and 1, got {getattr(self, name)}")

    def share(self, done: float) -> float:
        """The labelled share when `done` (0 to 1) of the steps after the warm-up are done."""
        return self.labelled_from + (self.labelled_to - self.labelled_from) * done


@dataclass(frozen=True)
class Constraint:
    """Weights of dual supervised learning on labelled batches, after the warm-up (during it they are 0).

    Attributes:
        forward: lambda in the loss of P(y | x).
        backward: lambda in the loss of P(x | y).
        per: "row": lambda is the number above. "x" or "y": it is (number / tokens of that side)^2 for each row.
    """

    forward: float = 0.0
    backward: float = 0.0
    per: str = "row"

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UnsupportedError(f"the constraint's weight {name} is 0 or more, got {getattr(self, name)}")
        if self.per not in ("row", *SIDES):
            raise UnsupportedError(f"the constraint's weights are per row, x or y; got {self.per!r}")

    def duality(self, warm: int) -> Duality:
        """The weights for a training with `warm` steps of warm-up."""
        if self.per == "row":
            return Duality(self.forward, self.backward, warm)
        there, back = (ByLength(w, self.per) if w else 0.0 for w in (self.forward, self.backward))
        return Duality(there, back, warm)


@dataclass(frozen=True)
class Looks:
    """How often and how held-out pairs are evaluated.

    Attributes:
        every: steps from one evaluation to the next.
        batch: held-out pairs that are evaluated at a time.
        beam: width of the search for the best output; 1 is greedy.
        samples: held-out pairs whose outputs are kept, for each direction.
    """

    every: int = 200
    batch: int = 128
    beam: int = 1
    samples: int = 5

    def __post_init__(self) -> None:
        _at_least_1(self, ("every", "batch", "beam"))
        if self.samples < 0:
            raise UnsupportedError(f"samples is 0 or more, got {self.samples}")


@dataclass(frozen=True)
class Loop:
    """The training loop, whatever it learns from.

    Attributes:
        rates: learning rates.
        clip: largest norm of the gradient of each model.
        looks: when and how held-out pairs are evaluated.
        save_every: steps from one saved state to the next; asynchronous rules save at evaluations only.
        seed: of all random draws.
    """

    rates: Rates = field(default_factory=Rates)
    clip: float = 5.0
    looks: Looks = field(default_factory=Looks)
    save_every: int = 500
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least_1(self, ("save_every",))
        if not self.clip > 0:
            raise UnsupportedError(f"clip is above 0, got {self.clip}")


@dataclass(frozen=True)
class Course:
    """A training: `warm` steps of supervised learning, then `steps` of the method.

    Steps are those of each worker: N workers read N times as many samples in as many steps.

    Attributes:
        warm: steps of the warm-up; 0 for a pair that is trained already.
        steps: after it.
        method: dual, back_translation (pseudo-labels of the models after the warm-up), iterative_back_translation (of
            the current models), or supervised (labelled data only).
        mix: batches and shares.
        constraint: weights of dual supervised learning, under every method.
        reward: of dual learning from unlabelled data.
        loop: rates, evaluations, saved states and the seed.
    """

    warm: int = 1000
    steps: int = 1000
    method: str = "dual"
    mix: Mix = field(default_factory=Mix)
    constraint: Constraint = field(default_factory=Constraint)
    reward: Reward = field(default_factory=Reward)
    loop: Loop = field(default_factory=Loop)

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise UnsupportedError(f"method is one of {', '.join(METHODS)}; got {self.method!r}")
        if self.warm < 0 or self.steps < 0 or self.total < 1:
            raise UnsupportedError(
                f"warm and steps are 0 or more and together at least 1, got {self.warm} and {self.steps}"
            )

    @property
    def total(self) -> int:
        """All steps."""
        return self.warm + self.steps

    def done(self, step: int) -> float:
        """The part of its phase (0 to 1) that is done when step number `step` (from 0) begins."""
        if step < self.warm:
            return step / self.warm
        return min(1.0, (step - self.warm) / max(1, self.steps))

    def labelled_share(self, step: int) -> float:
        """Weight of the labelled batch at step number `step`: 1 in the warm-up and without unlabelled data."""
        if step < self.warm or self.method == "supervised":
            return 1.0
        return self.mix.share(min(1.0, (step - self.warm) / max(1, self.steps - 1)))

    def save(self, path: Path) -> None:
        """Write it to a file, atomically."""
        files.write_text(path, json.dumps({"format": FORMAT, **self._row()}, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Course:
        """Read what `save` wrote; CheckpointError for anything else."""
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != FORMAT:
                raise CheckpointError(f"{path} holds no course of a training of a pair; give the folder of one")
            row = {name: PARTS[name](**value) if name in PARTS else value for name, value in found.items()}
            loop = {one.name: row.pop(one.name) for one in fields(Loop) if one.name in row}
            return cls(**row, loop=Loop(**loop))
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"cannot read the course {path}: {error}; begin in another folder") from error

    def check(self, other: Course, path: Path) -> None:
        """Raise CheckpointError that names what differs from the course with which the training in `path` began."""
        mine, its = _flat(self._row()), _flat(other._row())
        names = sorted(mine.keys() | its.keys())
        rows = [f"{n} is {mine.get(n)!r} now and was {its.get(n)!r}" for n in names if mine.get(n) != its.get(n)]
        if rows:
            raise CheckpointError(
                f"{path} holds a training with another course: {'; '.join(rows)}; give the same one to go on, another "
                "folder, or resume=False to begin anew"
            )

    def _row(self) -> dict[str, Any]:
        """As it is saved: the loop's settings stand beside the rest."""
        row = asdict(self)
        loop = row.pop("loop")
        return {**row, **loop}


PARTS: dict[str, type] = {"mix": Mix, "constraint": Constraint, "reward": Reward, "rates": Rates, "looks": Looks}
"""Settings of a saved course that have settings of their own."""


def _flat(row: dict[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= _flat(value, f"{before}{name}.") if isinstance(value, dict) else {f"{before}{name}": value}
    return found


def _at_least_1(settings: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(settings, name) < 1:
            raise UnsupportedError(f"{name} is at least 1, got {getattr(settings, name)}")
