# SPDX-License-Identifier: Apache-2.0
"""A small network in JAX, with optax, on scikit-learn's digits.

$ python examples/frameworks/with_jax.py
$ paceline sim --workers 4 examples/frameworks/with_jax.py
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from paceline_plugins.frameworks.jax import attach

x, digit = load_digits(return_X_y=True)
x = (x / 16).astype(np.float32)
batches = [(x[k : k + 20], digit[k : k + 20]) for k in range(0, 1400, 20)]
first, second = jax.random.split(jax.random.key(0))
params = {
    "hidden": {"w": jax.random.normal(first, (64, 32)) / 8, "b": jnp.zeros(32)},
    "out": {"w": jax.random.normal(second, (32, 10)) / 6, "b": jnp.zeros(10)},
}
optimizer = optax.sgd(0.2)
opt_state = optimizer.init(params)


def scores(params, inputs):  # type: ignore[no-untyped-def]
    hidden = jnp.tanh(inputs @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss(params, inputs, targets):  # type: ignore[no-untyped-def]
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, inputs), targets).mean()


@jax.jit
def step(params, opt_state, inputs, targets):  # type: ignore[no-untyped-def]
    updates, opt_state = optimizer.update(jax.grad(loss)(params, inputs, targets), opt_state, params)
    return optax.apply_updates(params, updates), opt_state


run = attach(params, rule="bmuf", period=4)
params = run.params
for _ in range(5):
    for inputs, targets in run.share(batches):
        params, opt_state = step(params, opt_state, inputs, targets)
        params = run.sync(params)
run.close()
params = run.params

right = np.asarray(scores(params, x[1400:])).argmax(1) == digit[1400:]
print(f"{run.minibatches} minibatches, {right.mean():.1%} of the digits held back are right")
