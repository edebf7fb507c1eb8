# SPDX-License-Identifier: Apache-2.0
"""What is done to pictures before they are learned from."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from PIL import Image
from torch import Tensor

from . import functional
from .functional import InterpolationMode

__all__ = ["InterpolationMode", "functional"]
Function = Callable[[Any], Any]


class Compose:
    """One after another."""

    def __init__(self, transforms: Sequence[Function]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


def Lambda(lambd: Function) -> Function:
    return lambd


class ToTensor:
    """A picture, or an array (height, width, channels), as (channels, height, width) from 0 to 1."""

    def __call__(self, picture: Any) -> Tensor:
        array = numpy.array(picture)
        array = array[:, :, None] if array.ndim == 2 else array
        tensor = torch.from_numpy(array).permute(2, 0, 1).contiguous()
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor


def ToPILImage() -> Function:
    """A tensor (channels, height, width) as a picture."""
    return lambda tensor: Image.fromarray((tensor.clamp(0, 1) * 255).byte().permute(1, 2, 0).squeeze(2).numpy())


def Normalize(mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> Function:
    """Less a mean, over a deviation, for each channel."""
    middle, spread = torch.tensor(mean).view(-1, 1, 1), torch.tensor(std).view(-1, 1, 1)
    return lambda tensor: (tensor - middle) / spread


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[-1])


class Resize:
    """To a size (height, width); a number is the shorter side."""

    def __init__(self, size: Any, interpolation: Any = None, antialias: Any = None) -> None:
        self.size = size

    def __call__(self, picture: Any) -> Any:
        if isinstance(self.size, int):
            width, height = picture.size
            scale = self.size / min(width, height)
            return picture.resize((max(1, round(width * scale)), max(1, round(height * scale))))
        return picture.resize((self.size[1], self.size[0]))


Scale = Resize


def CenterCrop(size: Any) -> Function:
    """The middle."""
    height, width = _pair(size)

    def crop(picture: Any) -> Any:
        left, top = (picture.size[0] - width) // 2, (picture.size[1] - height) // 2
        return picture.crop((left, top, left + width, top + height))

    return crop


class RandomCrop:
    """A part, anywhere, of the picture with a margin."""

    def __init__(self, size: Any, padding: int = 0, **kwargs: Any) -> None:
        self.height, self.width, self.padding = *_pair(size), padding

    def __call__(self, picture: Any) -> Any:
        margin = self.padding
        left = random.randint(-margin, max(-margin, picture.size[0] + margin - self.width))
        top = random.randint(-margin, max(-margin, picture.size[1] + margin - self.height))
        return picture.crop((left, top, left + self.width, top + self.height))


def RandomResizedCrop(size: Any, scale: Any = (0.08, 1.0), **kwargs: Any) -> Function:
    """A part, anywhere, scaled."""
    pair = _pair(size)[::-1]
    return lambda picture: picture.crop(
        (*(int(random.random() * side / 4) for side in picture.size), *picture.size)
    ).resize(pair)


RandomSizedCrop = RandomResizedCrop


def _flip(how: Any, p: float) -> Function:
    return lambda picture: picture.transpose(how) if float(torch.rand(1)) < p else picture


def RandomHorizontalFlip(p: float = 0.5) -> Function:
    return _flip(Image.Transpose.FLIP_LEFT_RIGHT, p)


def RandomVerticalFlip(p: float = 0.5) -> Function:
    return _flip(Image.Transpose.FLIP_TOP_BOTTOM, p)


def Pad(padding: int) -> Function:
    """A margin."""
    return lambda picture: picture.crop((-padding, -padding, picture.size[0] + padding, picture.size[1] + padding))


def Grayscale() -> Function:
    return lambda picture: picture.convert("L")


def ColorJitter(*args: Any, **kwargs: Any) -> Function:
    """Leaves the colours."""
    return lambda picture: picture


GaussianBlur = RandomApply = RandomGrayscale = ColorJitter
