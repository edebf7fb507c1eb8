# SPDX-License-Identifier: Apache-2.0
"""Trains a small net of blobs on scikit-learn's digits, on as many workers as there are."""

from __future__ import annotations

from sklearn.datasets import load_digits
from solver import Net, SGDSolver

import paceline

LAYERS = [
    ("ip1", "InnerProduct", {"num_output": 32}),
    ("relu1", "ReLU", {}),
    ("ip2", "InnerProduct", {"num_output": 10}),
]
SOLVER = {"base_lr": 0.1, "lr_policy": "step", "gamma": 0.5, "stepsize": 700, "momentum": 0.9, "weight_decay": 5e-4}

x, digit = load_digits(return_X_y=True)
x = (x / 16).astype("float32")
batches = [(x[k : k + 20], digit[k : k + 20]) for k in range(0, 1400, 20)]

net = Net(64, LAYERS, seed=1)
solver = SGDSolver(net, **SOLVER)
weights, history = ([blob.data for blob in blobs] for blobs in (solver.params, solver.history))
run = paceline.attach_arrays(weights, "bmuf", period=4, local_state="reset", momentum=history, decay=solver.momentum)
solver.stepsize //= run.world.size
for _ in range(20):
    for images, labels in run.share(batches):
        solver.base_lr = run.tuned("lr", SOLVER["base_lr"])
        net.set_input_arrays(images, labels)
        solver.step(1)
        run.step()
run.close()

right = (net.scores(x[1400:]).argmax(1) == digit[1400:]).mean()
print(f"{solver.iter} iterations, {right:.1%} of the digits held back are right")
