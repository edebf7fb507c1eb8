# SPDX-License-Identifier: Apache-2.0
"""New values near a winner's, proposed by Optuna's TPE sampler from all rounds so far.

Each group in a round is a trial; its value is its rank in the round (0 the best, 1 the worst), because measures of
different rounds do not compare. New values come from the range around the winner's. Until ten trials are over, TPE
draws uniformly.

Source: Bergstra et al., NIPS 2011 (TPE); Optuna's documentation of `ask` and `tell`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from paceline.errors import UnsupportedError
from paceline_plugins.search.population import Values
from paceline_plugins.search.space import Choice, IntRange, NumberRange, Range, Space

DRAWS = 20
"""Attempts to draw values that differ from the winner's."""


def optuna() -> Any:
    """The library; `UnsupportedError` if it is not installed."""
    try:
        import optuna as found
    except ImportError as error:
        raise UnsupportedError(
            "a search needs optuna, which is not installed: pip install 'paceline[search]'"
        ) from error
    found.logging.set_verbosity(found.logging.WARNING)
    return found


class Proposals:
    """Proposes values.

    Args:
        space: the search space.
        trials: (values, score from 0 for the best to 1) of all groups in all rounds so far.
        seed: of the sampler.
    """

    def __init__(self, space: Space, trials: Iterable[tuple[Values, float]], seed: int) -> None:
        self._optuna, self._space = optuna(), space
        self._study = self._optuna.create_study(sampler=self._optuna.samplers.TPESampler(seed=seed))
        kinds = {name: self._distribution(values, values) for name, values in space.items()}
        for values, score in trials:
            inner = {name: _inner(space[name], value) for name, value in values.items()}
            self._study.add_trial(
                self._optuna.trial.create_trial(params=inner, distributions=kinds, value=float(score))
            )

    def near(self, winner: Values) -> Values:
        """Other values, each in the range around the winner's."""
        values = winner
        for _ in range(DRAWS):
            values = self._draw(winner)
            if values != winner:
                break
        return values

    def _draw(self, winner: Values) -> Values:
        kinds = {name: self._distribution(own, own.near(winner[name])) for name, own in self._space.items()}
        params = self._study.ask(fixed_distributions=kinds).params
        return {name: _outer(own, params[name]) for name, own in self._space.items()}

    def _distribution(self, whole: Range, part: Range) -> Any:
        """Optuna's distribution for a part of a range; a choice is represented by its index."""
        kinds = self._optuna.distributions
        if isinstance(part, NumberRange):
            return kinds.FloatDistribution(part.low, part.high, log=part.log)
        if isinstance(part, IntRange):
            return kinds.IntDistribution(part.low, part.high)
        assert isinstance(part, Choice) and isinstance(whole, Choice)
        if not whole.ordered:
            return kinds.CategoricalDistribution(list(range(len(whole.values))))
        return kinds.IntDistribution(whole.values.index(part.values[0]), whole.values.index(part.values[-1]))


def _inner(values: Range, value: Any) -> Any:
    return values.values.index(value) if isinstance(values, Choice) else value


def _outer(values: Range, value: Any) -> Any:
    return values.values[value] if isinstance(values, Choice) else value
