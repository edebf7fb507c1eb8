# SPDX-License-Identifier: Apache-2.0
"""Dual inference: two trained opposite models answer together, without further training.

Xia, Bian, Qin, Yu and Liu, Dual Inference for Machine Learning, IJCAI 2017::

    score(y) = a log P(y|x; primal) + (1 - a) [ log P(x|y; dual) + log P(y) - log P(x) ]

By Bayes' rule both parts are log P(y|x), each according to one model. log P(x) is the same for every y: it changes the
score, not the ranking. The answer is the best of the primal model's beam; for a classifier whose beam is as wide as the
number of classes, the best of all labels.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from paceline import MismatchError, UnsupportedError
from paceline_dual.amounts import same_rows
from paceline_dual.choose import GRID, Candidates, Choice, Measure, Ranking, check_weight, choose, exact_match, mixed
from paceline_dual.protocols import Conditional, Prior, flat, repeat, undisturbed


@dataclass(frozen=True)
class DualInference:
    """Answers of two opposite models, trained together or not. Dropout is off meanwhile.

    Attributes:
        primal: P(y | x), whose beam gives the candidates.
        dual: P(x | y).
        prior_target: P(y).
        prior_source: P(x); only `score` needs it.
        weight: a, of the primal model; 1 is its own ranking, 0 is Bayes' rule alone.
        beam: number of candidates; a classifier's number of classes makes the answer exact.
    """

    primal: Conditional
    dual: Conditional
    prior_target: Prior
    prior_source: Prior | None = None
    weight: float = 0.5
    beam: int = 5

    def __post_init__(self) -> None:
        check_weight(self.weight)
        if self.beam < 1:
            raise UnsupportedError(f"the beam is at least 1 wide, got {self.beam}")

    def weighted(self, weight: float) -> DualInference:
        """A copy with another a, such as the one that `tune` found."""
        return replace(self, weight=weight)

    def best(self, x: Tensor) -> Tensor:
        """The answer to each row of x [B, ...]: [B, ...]."""
        return self.candidates(x).best(self.weight)

    def rank(self, x: Tensor, k: int | None = None) -> Ranking:
        """The k best candidates of each row, best first, with scores that lack log P(x).

        Args:
            x: [B, ...].
            k: number of candidates, at most the beam's width; None for all.
        """
        if k is not None and not 1 <= k <= self.beam:
            raise UnsupportedError(f"k is between 1 and the beam's width, {self.beam}; got {k}: widen the beam")
        y, scores = self.candidates(x).ranking(self.weight)
        return Ranking(y[:, :k], scores[:, :k])

    def score(self, y: Tensor, x: Tensor) -> Tensor:
        """The equation for given answers, log P(x) included, [B].

        Args:
            y: [B, ...].
            x: [B, ...].

        Raises:
            UnsupportedError: there is no prior of x.
            MismatchError: x and y are not the same number of rows.
        """
        if self.prior_source is None:
            raise UnsupportedError(
                "a score has log P(x) in it and there is no prior of x: give prior_source, or use rank, which goes "
                "without"
            )
        same_rows(x, y)
        with self._quiet():
            source = self.prior_source.log_prob(x)
            return mixed(self.weight, self.primal.log_prob(y, x), self._opposite(y, x) - source)

    def candidates(self, x: Tensor) -> Candidates:
        """The primal model's beam, and the opposite model's score of each candidate: enough for any weight.

        Args:
            x: [B, ...].

        Raises:
            MismatchError: x has no rows.
        """
        if not len(x):
            raise MismatchError("a batch without rows has no answers; leave it out")
        with self._quiet():
            y, primal = self.primal.beam(x, self.beam)
            opposite = self._opposite(flat(y), repeat(x, y.shape[1])).view_as(primal)
        return Candidates(y, primal, opposite)

    def tune(
        self, heldout: Iterable[tuple[Tensor, Tensor]], measure: Measure = exact_match, grid: Sequence[float] = GRID
    ) -> Choice:
        """Choose a on held-out pairs; each model runs once for all weights.

        Args:
            heldout: batches (x, y), which may differ in width. The measure is over all of them together.
            measure: of the answers and of y, both [N, ...]; more is better.
            grid: weights in [0, 1]; the largest wins a tie.

        Raises:
            DataError: there are no pairs.
        """
        return choose([(self.candidates(x), _pair(x, y)) for x, y in heldout], measure, grid)

    def _opposite(self, y: Tensor, x: Tensor) -> Tensor:
        return self.dual.log_prob(x, y) + self.prior_target.log_prob(y)

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        """Context with every model in eval mode."""
        with ExitStack() as stack:
            for model in (self.primal, self.dual, self.prior_target, self.prior_source):
                stack.enter_context(undisturbed(model))
            yield


def _pair(x: Tensor, y: Tensor) -> Tensor:
    same_rows(x, y)
    return y
