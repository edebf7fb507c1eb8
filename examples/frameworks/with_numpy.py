# SPDX-License-Identifier: Apache-2.0
"""Softmax regression in NumPy on scikit-learn's digits.

$ python examples/frameworks/with_numpy.py                               # one worker
$ paceline sim --workers 4 examples/frameworks/with_numpy.py             # four virtual workers
$ paceline run --workers 2 examples/frameworks/with_numpy.py             # two processes
"""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

import paceline

x, digit = load_digits(return_X_y=True)
x, one_hot = x / 16, np.eye(10)[digit]
batches = [(x[k : k + 20], one_hot[k : k + 20]) for k in range(0, 1400, 20)]
weights, bias = np.zeros((64, 10)), np.zeros(10)

run = paceline.attach_arrays({"weights": weights, "bias": bias}, rule="bmuf", period=4)
for _ in range(5):
    for inputs, targets in run.share(batches):
        scores = np.exp(inputs @ weights + bias)
        error = scores / scores.sum(1, keepdims=True) - targets
        weights -= 0.5 * inputs.T @ error / len(inputs)
        bias -= 0.5 * error.mean(0)
        run.step()
run.close()

right = (x[1400:] @ weights + bias).argmax(1) == digit[1400:]
print(f"{run.minibatches} minibatches, {right.mean():.1%} of the digits held back are right")
