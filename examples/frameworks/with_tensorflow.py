# SPDX-License-Identifier: Apache-2.0
"""A small network in TensorFlow, with a compiled step, on scikit-learn's digits.

$ python examples/frameworks/with_tensorflow.py
$ paceline sim --workers 2 examples/frameworks/with_tensorflow.py
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf
from sklearn.datasets import load_digits

import paceline

x, digit = load_digits(return_X_y=True)
x, digit = (x / 16).astype("float32"), digit.astype("int32")
batches = [(x[k : k + 20], digit[k : k + 20]) for k in range(0, 1400, 20)]
hidden = tf.Variable(tf.random.stateless_normal((64, 32), seed=(0, 1)) / 8), tf.Variable(tf.zeros(32))
out = tf.Variable(tf.random.stateless_normal((32, 10), seed=(0, 2)) / 6), tf.Variable(tf.zeros(10))
variables = [*hidden, *out]


def scores(inputs):  # type: ignore[no-untyped-def]
    return tf.tanh(inputs @ hidden[0] + hidden[1]) @ out[0] + out[1]


@tf.function(reduce_retracing=True)
def train_step(inputs, targets):  # type: ignore[no-untyped-def]
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores(inputs)))
    for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
        variable.assign_sub(0.2 * gradient)


run = paceline.attach_arrays(variables, rule="bmuf", period=4)
for _ in range(5):
    for inputs, targets in run.share(batches):
        train_step(inputs, targets)
        run.step()
run.close()

right = scores(x[1400:]).numpy().argmax(1) == digit[1400:]
print(f"{run.minibatches} minibatches, {right.mean():.1%} of the digits held back are right")
