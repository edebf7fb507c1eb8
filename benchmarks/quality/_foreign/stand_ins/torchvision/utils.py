# SPDX-License-Identifier: Apache-2.0
"""Pictures into one, and into files."""

from __future__ import annotations

from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor


def make_grid(tensor: Any, nrow: int = 8, padding: int = 2, normalize: bool = False, **kwargs: Any) -> Tensor:
    """Pictures (count, channels, height, width) side by side."""
    pictures = torch.stack(list(tensor)) if isinstance(tensor, (list, tuple)) else tensor
    pictures = pictures[None] if pictures.dim() == 3 else pictures
    pictures = pictures.expand(-1, 3, -1, -1) if pictures.shape[1] == 1 else pictures
    rows = [torch.cat(list(row), dim=2) for row in pictures.split(nrow)]
    width = max(row.shape[2] for row in rows)
    return torch.cat([torch.nn.functional.pad(row, (0, width - row.shape[2])) for row in rows], dim=1)


def save_image(tensor: Any, fp: Any, **kwargs: Any) -> None:
    """All in one file."""
    grid = make_grid(tensor, **{name: value for name, value in kwargs.items() if name in ("nrow", "normalize")})
    array = (grid.detach().clamp(0, 1) * 255).byte().permute(1, 2, 0).cpu().numpy()
    Image.fromarray(numpy.ascontiguousarray(array)).save(fp)
