# SPDX-License-Identifier: Apache-2.0
"""Functions under the classes."""

from __future__ import annotations

import enum
from typing import Any


class InterpolationMode(enum.Enum):
    """How pictures are scaled."""

    NEAREST = "nearest"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


def resize(picture: Any, size: Any, *args: Any, **kwargs: Any) -> Any:
    """To (height, width)."""
    return picture.resize((size[1], size[0]))


def resized_crop(picture: Any, top: int, left: int, height: int, width: int, size: Any, *args: Any) -> Any:
    """A part, scaled."""
    return resize(picture.crop((left, top, left + width, top + height)), size)


def to_tensor(picture: Any) -> Any:
    """As `ToTensor`."""
    from . import ToTensor

    return ToTensor()(picture)


def center_crop(picture: Any, size: Any) -> Any:
    """As `CenterCrop`."""
    from . import CenterCrop

    return CenterCrop(size)(picture)
