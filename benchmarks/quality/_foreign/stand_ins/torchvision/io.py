# SPDX-License-Identifier: Apache-2.0
"""Pictures from files."""

from __future__ import annotations

import numpy
import torch
from PIL import Image
from torch import Tensor


def read_image(path: str) -> Tensor:
    """A picture as (channels, height, width), uint8."""
    return torch.from_numpy(numpy.array(Image.open(path).convert("RGB"))).permute(2, 0, 1)
