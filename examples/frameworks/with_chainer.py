# SPDX-License-Identifier: Apache-2.0
"""A small network in Chainer, with its momentum SGD, on scikit-learn's digits.

$ python examples/frameworks/with_chainer.py
$ paceline sim --workers 2 examples/frameworks/with_chainer.py
"""

from __future__ import annotations

import chainer
import numpy as np
from chainer import functions, links
from sklearn.datasets import load_digits

import paceline

x, digit = load_digits(return_X_y=True)
x, digit = (x / 16).astype("float32"), digit.astype("int32")
batches = [(x[k : k + 20], digit[k : k + 20]) for k in range(0, 1400, 20)]
np.random.seed(0)
model = chainer.Sequential(links.Linear(64, 32), functions.tanh, links.Linear(32, 10))
optimizer = chainer.optimizers.MomentumSGD(lr=0.05, momentum=0.9).setup(model)

weights = {name: parameter.array for name, parameter in model.namedparams()}
run = paceline.attach_arrays(weights, "averaging", period=4)  # each worker keeps its momentum
for _ in range(5):
    for inputs, targets in run.share(batches):
        optimizer.lr = run.tuned("lr", 0.05)
        loss = functions.softmax_cross_entropy(model(inputs), targets)
        model.cleargrads()
        loss.backward()
        optimizer.update()
        run.step()
run.close()

right = model(x[1400:]).array.argmax(1) == digit[1400:]
print(f"{run.minibatches} minibatches, {right.mean():.1%} of the digits held back are right")
