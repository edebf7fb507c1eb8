# SPDX-License-Identifier: Apache-2.0
"""Trains a small Keras model in a process of its own, since a process has one backend; prints what was seen as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np

import paceline
from paceline_plugins.frameworks.keras import Paceline
from tests.helpers import simulate

DRAWN = np.random.RandomState(0)
X = DRAWN.randn(32, 5).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


def model(**compiled: Any) -> Any:
    keras.utils.set_random_seed(0)
    made = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.BatchNormalization()])
    made.add(keras.layers.Dense(1))
    made.compile(keras.optimizers.Adam(0.05), "mse", **compiled)
    return made


def train(rule: str | None, resume: Path | None = None, save: Path | None = None) -> list[bytes]:
    """Two epochs, or the second alone behind a resume; the first may be saved. Returns the weights' bits."""
    made, x, y, callbacks = model(), X, Y, []
    if rule is not None:
        callback = Paceline(made, rule)
        if resume is not None:
            callback.run.resume(resume)
        x, y = callback.part(X, Y)
        callbacks = [callback]
        if save is not None:
            first = lambda epoch, logs: callback.run.save(save) if epoch == 0 else None  # noqa: E731
            callbacks.append(keras.callbacks.LambdaCallback(on_epoch_end=first))
    made.fit(x, y, 8, 2, 0, callbacks, shuffle=False, initial_epoch=0 if resume is None else 1)
    return [np.array(value).tobytes() for value in made.get_weights()]


def mean_of_two() -> list[float]:
    """One weight, pulled half of the way to 4 on one worker and to 8 on the other, in each of two steps."""
    made = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")])
    made.compile(keras.optimizers.SGD(0.25), "mse")
    callback = Paceline(made, "averaging(period=2)")
    target = np.full((2, 1), 4.0 + 4.0 * callback.run.world.rank, "float32")
    made.fit(np.ones((2, 1), "float32"), target, 1, 1, 0, [callback])
    return [float(value) for value in made.get_weights()[0].ravel()]


def refusal(rule: str = "bmuf", **compiled: Any) -> str:
    try:
        Paceline(model(**compiled), rule)
    except paceline.UnsupportedError as error:
        return str(error)
    return ""


def refusal_of_a_strategy() -> str:
    """Of a model whose variables TensorFlow spreads over devices; empty on other back ends."""
    if keras.backend.backend() != "tensorflow":
        return ""
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        made = model()
    try:
        Paceline(made, "bmuf")
    except paceline.UnsupportedError as error:
        return str(error)
    return "not refused"


def main(folder: Path) -> None:
    rule = "bmuf(period=2)"
    plain = train(None)
    pair = simulate(lambda: train(rule, save=folder / "saved"), 2)
    resumed = simulate(lambda: train(rule, resume=folder / "saved"), 2)
    seen = {
        "backend": keras.backend.backend(),
        "one is plain": train(rule) == plain,
        "two agree": pair[0] == pair[1] and pair[0] != plain,
        "resumed": resumed[0] == pair[0],
        "mean of 3 and 6": simulate(mean_of_two, 2),
        "gradients": refusal("sync"),
        "strategy": refusal_of_a_strategy(),
        "several steps": refusal(steps_per_execution=2),
    }
    print(json.dumps(seen))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
