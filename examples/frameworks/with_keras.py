# SPDX-License-Identifier: Apache-2.0
"""A small Keras 3 model on scikit-learn's digits, on JAX, torch or TensorFlow.

$ KERAS_BACKEND=jax python examples/frameworks/with_keras.py
$ KERAS_BACKEND=torch paceline sim --workers 2 examples/frameworks/with_keras.py
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import keras
from sklearn.datasets import load_digits

from paceline_plugins.frameworks.keras import Paceline

keras.utils.set_random_seed(0)
x, digit = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, "tanh"), keras.layers.Dense(10)])
model.compile(keras.optimizers.SGD(0.2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

callback = Paceline(model, rule="bmuf", period=4)
inputs, targets = callback.part(x[:1400], digit[:1400])
model.fit(inputs, targets, batch_size=20, epochs=5, verbose=0, callbacks=[callback])

right = model.predict(x[1400:], verbose=0).argmax(1) == digit[1400:]
print(f"{callback.run.minibatches} minibatches, {right.mean():.1%} of the digits held back are right")
