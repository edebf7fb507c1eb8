# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's handwritten digits, 8 x 8 grey pixels: a few with labels, many without, the rest to be judged on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

CLASSES = 10
PIXELS = 64
TEST = 500


@dataclass(frozen=True)
class Digits:
    """Three parts that share no picture. Pixels are from 0 to 1, float32 (pictures, PIXELS); labels int64."""

    x: torch.Tensor
    y: torch.Tensor
    unlabelled: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


def load(per_class: int, seed: int) -> Digits:
    """`per_class` labels of each digit; which ones, and which pictures are for the test, is the seed's choice."""
    from sklearn.datasets import load_digits

    pictures, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pictures).float() / 16, torch.from_numpy(labels).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    test, rest = order[:TEST], order[TEST:]
    known = torch.cat([rest[y[rest] == label][:per_class] for label in range(CLASSES)])
    unknown = rest[~torch.isin(rest, known)]
    return Digits(x[known], y[known], x[unknown], x[test], y[test])
