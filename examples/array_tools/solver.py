# SPDX-License-Identifier: Apache-2.0
"""A trainer in the shape of Caffe's Python interface, in NumPy: blobs, a net of layers, a solver with `step`.

It knows nothing of paceline. As in Caffe, momentum SGD makes

    V = momentum * V + rate * (gradient + weight_decay * W)
    W = W - V

with a rate that follows from `base_lr` by a policy: "fixed", or "step", which multiplies by gamma after each `stepsize`
iterations.
"""

from __future__ import annotations

from typing import Any

import numpy as np


class Blob:
    """Numbers and their gradient; `data` and `diff` have one shape, and stay where they are."""

    def __init__(self, data: Any) -> None:
        self.data = np.array(data, np.float32)
        self.diff = np.zeros_like(self.data)


class InnerProduct:
    """y = x W' + b."""

    def __init__(self, inputs: int, num_output: int, draw: np.random.Generator) -> None:
        weight = draw.uniform(-1, 1, (num_output, inputs)) * np.sqrt(3 / inputs)  # Caffe's filler "xavier"
        self.blobs = [Blob(weight), Blob(np.zeros(num_output))]

    def forward(self, x: Any) -> Any:
        self.x = x
        return x @ self.blobs[0].data.T + self.blobs[1].data

    def backward(self, top: Any) -> Any:
        self.blobs[0].diff[...] = top.T @ self.x
        self.blobs[1].diff[...] = top.sum(0)
        return top @ self.blobs[0].data


class ReLU:
    """y = max(x, 0)."""

    blobs: tuple[()] = ()

    def forward(self, x: Any) -> Any:
        self.above = x > 0
        return x * self.above

    def backward(self, top: Any) -> Any:
        return top * self.above


class Net:
    """Layers in their order, and softmax with loss on top.

    Args:
        inputs: numbers of a sample.
        layers: (name, type, settings), as the layers of a prototxt.
        seed: of the first weights.

    Attributes:
        params: name of a layer -> its blobs, the weight and the bias.
        blobs: "data", "label" and "loss".
    """

    def __init__(self, inputs: int, layers: list[tuple[str, str, dict[str, int]]], seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.layers: dict[str, Any] = {}
        for name, kind, settings in layers:
            if kind == "InnerProduct":
                self.layers[name] = InnerProduct(inputs, draw=draw, **settings)
                inputs = settings["num_output"]
            else:
                self.layers[name] = ReLU()
        self.params = {name: layer.blobs for name, layer in self.layers.items() if layer.blobs}
        self.blobs: dict[str, Any] = {}

    def set_input_arrays(self, data: Any, labels: Any) -> None:
        """The next minibatch."""
        self.blobs = {"data": data, "label": labels}

    def scores(self, data: Any) -> Any:
        """Without the softmax, shape (samples, classes)."""
        for layer in self.layers.values():
            data = layer.forward(data)
        return data

    def forward_backward(self) -> None:
        """The loss, and the gradient of its mean over the minibatch in each blob's `diff`."""
        scores, labels = self.scores(self.blobs["data"]), self.blobs["label"]
        parts = np.exp(scores - scores.max(1, keepdims=True))
        parts /= parts.sum(1, keepdims=True)
        rows = np.arange(len(labels))
        self.blobs["loss"] = float(-np.log(parts[rows, labels]).mean())
        parts[rows, labels] -= 1
        top = parts / len(labels)
        for layer in reversed(self.layers.values()):
            top = layer.backward(top)


class SGDSolver:
    """Momentum SGD over a net; its settings have the names of a solver's prototxt."""

    def __init__(self, net: Net, **settings: Any) -> None:
        self.net, self.iter = net, 0
        self.base_lr, self.lr_policy = settings["base_lr"], settings.get("lr_policy", "fixed")
        self.gamma, self.stepsize = settings.get("gamma", 1.0), settings.get("stepsize", 1)
        self.momentum, self.weight_decay = settings.get("momentum", 0.0), settings.get("weight_decay", 0.0)
        self.params = [blob for blobs in net.params.values() for blob in blobs]
        self.history = [Blob(np.zeros_like(blob.data)) for blob in self.params]

    @property
    def rate(self) -> float:
        """That of this iteration."""
        return self.base_lr * (self.gamma ** (self.iter // self.stepsize) if self.lr_policy == "step" else 1.0)

    def step(self, iterations: int) -> None:
        """So many iterations on the net's present minibatch."""
        for _ in range(iterations):
            self.net.forward_backward()
            for blob, kept in zip(self.params, self.history, strict=True):
                kept.data *= self.momentum
                kept.data += self.rate * (blob.diff + self.weight_decay * blob.data)
                blob.data -= kept.data
            self.iter += 1
