# SPDX-License-Identifier: Apache-2.0
"""What stands in for `keras.datasets.mnist.load_data`, which downloads."""

from __future__ import annotations

import os
from typing import Any

import numpy
from torchvision.datasets import SAMPLES, pictures


def mnist(path: str = "mnist.npz") -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """(pictures, digits) for training and for evaluation."""
    count = int(os.environ.get(SAMPLES, "600"))
    made = (pictures(count, 10, (28, 28), 1), pictures(count // 3, 10, (28, 28), 2))
    train, test = ((data, numpy.array(digits, dtype=numpy.uint8)) for data, digits in made)
    return train, test
