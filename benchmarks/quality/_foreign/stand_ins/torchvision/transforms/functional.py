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


def get_image_size(picture: Any) -> list[int]:
    """[width, height]."""
    return list(picture.size)


def get_dimensions(picture: Any) -> list[int]:
    """[channels, height, width]."""
    return [len(picture.getbands()), picture.size[1], picture.size[0]]


def crop(picture: Any, top: int, left: int, height: int, width: int) -> Any:
    """A part."""
    return picture.crop((left, top, left + width, top + height))


def pad(picture: Any, padding: Any, fill: Any = 0, padding_mode: str = "constant") -> Any:
    """With a margin: left, top, right, bottom."""
    left, top, *rest = [padding] * 4 if isinstance(padding, int) else padding
    right, bottom = rest or (left, top)
    return picture.crop((-left, -top, picture.size[0] + right, picture.size[1] + bottom))
