# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's MLPClassifier on its digits.

$ python examples/frameworks/with_sklearn.py
$ paceline sim --workers 4 examples/frameworks/with_sklearn.py
"""

from __future__ import annotations

from sklearn.datasets import load_digits
from sklearn.neural_network import MLPClassifier

from paceline_plugins.frameworks.sklearn import attach

x, digit = load_digits(return_X_y=True)
x = x / 16
batches = [(x[k : k + 20], digit[k : k + 20]) for k in range(0, 1400, 20)]
model = MLPClassifier((32,), solver="sgd", momentum=0, learning_rate_init=0.2, random_state=0)
model.partial_fit(*batches[0], classes=range(10))  # makes the parameters

run = attach(model, rule="bmuf", period=4)
for _ in range(5):
    for inputs, targets in run.share(batches):
        model.partial_fit(inputs, targets)
        run.step()
run.close()
print(f"{run.minibatches} minibatches, {model.score(x[1400:], digit[1400:]):.1%} of the digits held back are right")
