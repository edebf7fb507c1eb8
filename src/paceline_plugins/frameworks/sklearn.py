# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's models with `partial_fit`: the two lines, and `run.step()` after each `partial_fit`.

    model.partial_fit(x[:20], y[:20], classes=range(10))    # makes the parameters
    run = attach(model, rule="bmuf", period=4)
    for inputs, targets in run.share(batches):
        model.partial_fit(inputs, targets)
        run.step()

Block rules only: the gradients never leave `partial_fit`. Models that accumulate statistics instead of following a
gradient (naive Bayes, k-means, scalers) have no meaningful mean of differences, and are refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import numpy as np

from paceline.core.lazy import needed
from paceline.doors.adapters.arrays import WritableRun
from paceline.doors.adapters.elsewhere import refuse_gradients
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.run.attach import prepare

with needed("the adapter for scikit-learn", "sklearn"):
    from sklearn.linear_model import Perceptron, SGDClassifier, SGDOneClassSVM, SGDRegressor
    from sklearn.neural_network import MLPClassifier, MLPRegressor

KNOWN: tuple[tuple[type, tuple[str, ...]], ...] = (
    (SGDOneClassSVM, ("coef_", "offset_")),
    (SGDClassifier, ("coef_", "intercept_")),
    (SGDRegressor, ("coef_", "intercept_")),
    (Perceptron, ("coef_", "intercept_")),
    (MLPClassifier, ("coefs_", "intercepts_")),
    (MLPRegressor, ("coefs_", "intercepts_")),
)
"""Class -> the attributes that hold its parameters."""
COUNTERS = ("t_", "n_iter_", "_no_improvement_count", "best_loss_")
OF_OPTIMIZER = ("t", "learning_rate", "ms", "vs", "velocities")


class EstimatorRun(WritableRun):
    """A run over an estimator; made by `attach`. `step()` looks up its arrays again, since a fit may replace them."""

    def __init__(self, estimator: Any, attributes: tuple[str, ...], rule: Rule, settings: Any) -> None:
        self._estimator, self._attributes = estimator, attributes
        velocities, decay = _velocities(estimator), None
        if velocities is not None:
            decay = float(estimator._optimizer.momentum)
        self._has_momentum = velocities is not None
        super().__init__(arrays_of(estimator, attributes), None, velocities, decay, rule, settings)
        self.include(estimator=_EstimatorState(estimator))

    def step(self, arrays: Any = None, momentum: Any = None) -> None:
        """Call it after `partial_fit`; exchanges change the estimator's arrays in place."""
        if not self._closed:
            super().step(
                arrays_of(self._estimator, self._attributes),
                _velocities(self._estimator) if self._has_momentum else None,
            )

    def model_for_export(self) -> Any:
        """A copy of the estimator with the global parameters."""
        copied = copy.deepcopy(self._estimator)
        values = self.global_state()
        for name, array in arrays_of(copied, self._attributes).items():
            array[...] = values[name].numpy()
        return copied

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """Inside, the estimator holds the global parameters; afterwards the worker's own."""
        with super().global_model():
            yield self._estimator


class _EstimatorState:
    """An estimator's counters, optimizer and random generator, for checkpoints."""

    def __init__(self, estimator: Any) -> None:
        self._estimator = estimator

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = self._estimator, getattr(self._estimator, "_optimizer", None)
        generator = getattr(model, "_random_state", None)
        return {
            "counters": {name: getattr(model, name) for name in COUNTERS if hasattr(model, name)},
            "optimizer": {name: getattr(optimizer, name) for name in OF_OPTIMIZER if hasattr(optimizer, name)},
            "generator": generator.get_state() if isinstance(generator, np.random.RandomState) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["counters"].items():
            setattr(self._estimator, name, value)
        for name, value in state["optimizer"].items():
            now = getattr(self._estimator._optimizer, name)
            if isinstance(now, list):
                for array, saved in zip(now, value, strict=True):
                    array[...] = saved
            else:
                setattr(self._estimator._optimizer, name, value)
        if state["generator"] is not None:
            self._estimator._random_state.set_state(state["generator"])


def attach(
    estimator: Any, rule: Rule | str | None = None, *, attributes: tuple[str, ...] | None = None, **settings: Any
) -> EstimatorRun:
    """Attach paceline to an estimator; call `run.step()` after each `partial_fit`.

    Call `partial_fit` once before, with the same classes on every worker, since it makes the parameters; all workers
    then start from rank 0's. Rules can restart the momentum of an MLP with solver="sgd"; Adam's state stays with each
    worker.

    Args:
        estimator: SGDClassifier, SGDRegressor, SGDOneClassSVM, Perceptron, MLPClassifier or MLPRegressor.
        rule: a rule that exchanges blocks.
        attributes: names of the attributes that hold another estimator's parameters (arrays, or lists of arrays).
        settings: as for `paceline.attach`.

    Raises:
        UnsupportedError: the estimator or the rule is not supported.
    """
    chosen, how = prepare(rule, **settings)
    refuse_gradients(chosen, "scikit-learn", "inside partial_fit")
    return EstimatorRun(estimator, attributes or _attributes(estimator), chosen, how)


def _attributes(estimator: Any) -> tuple[str, ...]:
    kind = type(estimator).__name__
    if getattr(estimator, "average", False):
        raise UnsupportedError(
            f"{kind}(average={estimator.average!r}) keeps two sets of parameters; use average=False: the global model "
            "of a block rule is an average already"
        )
    if getattr(estimator, "solver", "sgd") == "lbfgs":
        raise UnsupportedError(f'{kind}(solver="lbfgs") has no partial_fit; use solver="sgd" or "adam"')
    for known, attributes in KNOWN:
        if isinstance(estimator, known):
            return attributes
    raise UnsupportedError(
        f"{kind} is none of {', '.join(known.__name__ for known, _ in KNOWN)}; if it follows a gradient, name the "
        'attributes that hold its parameters: attach(model, attributes=("coef_", "intercept_"))'
    )


def arrays_of(estimator: Any, attributes: tuple[str, ...]) -> dict[str, Any]:
    """Name -> array, of attributes that are arrays or lists of arrays."""
    found: dict[str, Any] = {}
    for name in attributes:
        value = getattr(estimator, name, None)
        if value is None:
            raise UnsupportedError(
                f"{type(estimator).__name__} has no {name} yet: call partial_fit once, on a few samples and with all "
                "classes, then attach"
            )
        if isinstance(value, list):
            found |= {f"{name}{number}": array for number, array in enumerate(value)}
        elif hasattr(value, "toarray"):
            raise UnsupportedError(f"{name} is sparse; call densify() and train on")
        else:
            found[name] = value
    return found


def _velocities(estimator: Any) -> dict[str, Any] | None:
    """The momentum of an MLP under SGD, by the names of its parameters."""
    optimizer: Any = getattr(estimator, "_optimizer", None)
    if not getattr(optimizer, "velocities", None) or not 0 < optimizer.momentum < 1:
        return None
    arrays = arrays_of(estimator, ("coefs_", "intercepts_"))
    return dict(zip(arrays, optimizer.velocities, strict=True))
