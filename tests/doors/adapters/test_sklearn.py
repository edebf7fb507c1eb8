# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's models with `partial_fit` on its digits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sklearn.cluster import MiniBatchKMeans
from sklearn.datasets import load_digits
from sklearn.linear_model import Perceptron, SGDClassifier, SGDOneClassSVM, SGDRegressor
from sklearn.neural_network import MLPClassifier, MLPRegressor

import paceline
from paceline_plugins.frameworks import sklearn as adapter
from tests.helpers import same_bits, simulate

X, DIGIT = load_digits(return_X_y=True)
X, ODD = X[:260] / 16, DIGIT[:260] % 2
BATCHES = [(X[k : k + 20], ODD[k : k + 20]) for k in range(20, 260, 20)]
MODELS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: SGDClassifier(random_state=0),
    "regression": lambda: SGDRegressor(random_state=0),
    "one class": lambda: SGDOneClassSVM(random_state=0),
    "perceptron": lambda: Perceptron(random_state=0),
    "mlp sgd": lambda: MLPClassifier((8,), solver="sgd", learning_rate_init=0.1, random_state=0),
    "mlp adam": lambda: MLPRegressor(hidden_layer_sizes=(8,), random_state=0),
}


def fit(model: Any, x: Any, y: Any) -> None:
    if isinstance(model, SGDOneClassSVM):
        model.partial_fit(x)
    elif isinstance(model, (SGDRegressor, MLPRegressor)):
        model.partial_fit(x, y.astype(float))
    else:
        model.partial_fit(x, y, classes=[0, 1])


def begun(name: str) -> Any:
    model = MODELS[name]()
    fit(model, X[:20], ODD[:20])
    return model


def values(model: Any) -> dict[str, torch.Tensor]:
    return {k: torch.from_numpy(v.copy()) for k, v in adapter.arrays_of(model, adapter._attributes(model)).items()}


def program(name: str, rule: str) -> Callable[[], Any]:
    def made() -> Any:
        model = begun(name)
        with adapter.attach(model, rule) as run:
            for x, y in run.share(BATCHES):
                fit(model, x, y)
                run.step()
        assert same_bits(values(run.model_for_export()), values(model))
        return model

    return made


@pytest.mark.parametrize("name", MODELS)
def test_one_worker_is_the_plain_program_and_several_agree(name: str) -> None:
    plain = begun(name)
    for x, y in BATCHES:
        fit(plain, x, y)
    assert same_bits(values(program(name, "bmuf(period=2)")()), values(plain))
    ends = [values(model) for model in simulate(program(name, "averaging(period=2)"), 2)]
    assert same_bits(ends[0], ends[1]) and not same_bits(ends[0], values(plain))


@pytest.mark.parametrize(("rule", "ends"), [("bmuf(period=2)", False), ("bmuf(period=2, local_state='reset')", True)])
def test_momentum_of_a_network_stays_or_restarts_with_each_block(rule: str, ends: bool) -> None:
    def made() -> list[bool]:
        model, still = begun("mlp sgd"), []
        with adapter.attach(model, rule) as run:
            for x, y in run.share(BATCHES):
                fit(model, x, y)
                run.step()
                still.append(all(not v.any() for v in model._optimizer.velocities))
        return still

    assert simulate(made, 2)[0] == [False, ends] * 3


def test_resume_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def made(stop: int, resume: bool) -> Any:
        model = begun("mlp adam")
        with adapter.attach(model, "bmuf(period=2)") as run:
            if resume:
                run.resume(tmp_path / "saved")
            for x, y in BATCHES[run.minibatches : stop]:
                fit(model, x, y)
                run.step()
            if stop == 3:
                run.save(tmp_path / "saved")
        return values(model)

    whole = simulate(partial(made, 8, False), 2)
    simulate(partial(made, 3, False), 2)
    assert same_bits(simulate(partial(made, 8, True), 2)[0], whole[0])


REFUSED = [
    (lambda: SGDClassifier(), "bmuf", "no coef_ yet"),
    (lambda: SGDClassifier(average=True), "bmuf", "two sets of parameters"),
    (lambda: MLPClassifier(solver="lbfgs"), "bmuf", "no partial_fit"),
    (lambda: MiniBatchKMeans(), "bmuf", "MiniBatchKMeans is none of"),
    (lambda: SGDClassifier(), "sync", "sync.* exchanges gradients"),
    (lambda: SGDClassifier(), "bmuf(warmup=5)", "exchanges gradients"),
]


@pytest.mark.parametrize(("make", "rule", "says"), REFUSED)
def test_what_cannot_be_served_is_refused_by_name(make: Any, rule: str, says: str) -> None:
    with pytest.raises(paceline.UnsupportedError, match=says):
        adapter.attach(make(), rule)
