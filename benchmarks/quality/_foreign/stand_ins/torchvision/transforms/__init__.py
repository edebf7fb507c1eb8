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


class Compose:
    """One after another."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        self.transforms = transforms

    def __call__(self, picture: Any) -> Any:
        for transform in self.transforms:
            picture = transform(picture)
        return picture


class Lambda:
    """A function."""

    def __init__(self, lambd: Callable[[Any], Any]) -> None:
        self.lambd = lambd

    def __call__(self, picture: Any) -> Any:
        return self.lambd(picture)


class ToTensor:
    """A picture, or an array (height, width, channels), as (channels, height, width) from 0 to 1."""

    def __call__(self, picture: Any) -> Tensor:
        array = numpy.array(picture)
        array = array[:, :, None] if array.ndim == 2 else array
        tensor = torch.from_numpy(array).permute(2, 0, 1).contiguous()
        return tensor.float() / 255 if tensor.dtype == torch.uint8 else tensor


class ToPILImage:
    """A tensor (channels, height, width) as a picture."""

    def __call__(self, tensor: Tensor) -> Any:
        array = (tensor.clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
        return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)


class Normalize:
    """Less a mean, over a deviation, for each channel."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], inplace: bool = False) -> None:
        self.mean, self.std = torch.tensor(mean), torch.tensor(std)

    def __call__(self, tensor: Tensor) -> Tensor:
        return (tensor - self.mean.view(-1, 1, 1)) / self.std.view(-1, 1, 1)


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


class CenterCrop:
    """The middle."""

    def __init__(self, size: Any) -> None:
        self.height, self.width = _pair(size)

    def __call__(self, picture: Any) -> Any:
        left, top = (picture.size[0] - self.width) // 2, (picture.size[1] - self.height) // 2
        return picture.crop((left, top, left + self.width, top + self.height))


class RandomCrop:
    """A part, anywhere, of the picture with a margin."""

    def __init__(self, size: Any, padding: int = 0, **kwargs: Any) -> None:
        self.height, self.width, self.padding = *_pair(size), padding

    def __call__(self, picture: Any) -> Any:
        margin = self.padding
        left = random.randint(-margin, max(-margin, picture.size[0] + margin - self.width))
        top = random.randint(-margin, max(-margin, picture.size[1] + margin - self.height))
        return picture.crop((left, top, left + self.width, top + self.height))


class RandomResizedCrop:
    """A part, anywhere, scaled."""

    def __init__(self, size: Any, scale: Any = (0.08, 1.0), **kwargs: Any) -> None:
        self.height, self.width = _pair(size)

    def __call__(self, picture: Any) -> Any:
        left, top = (int(random.random() * side / 4) for side in picture.size)
        return picture.crop((left, top, *picture.size)).resize((self.width, self.height))


RandomSizedCrop = RandomResizedCrop


class RandomHorizontalFlip:
    """Now and then the mirror's picture."""

    def __init__(self, p: float = 0.5) -> None:
        self.p = p

    def __call__(self, picture: Any) -> Any:
        return picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if float(torch.rand(1)) < self.p else picture


class Pad:
    """A margin."""

    def __init__(self, padding: int) -> None:
        self.padding = padding

    def __call__(self, picture: Any) -> Any:
        margin = self.padding
        return picture.crop((-margin, -margin, picture.size[0] + margin, picture.size[1] + margin))


class Grayscale:
    """Without colours."""

    def __call__(self, picture: Any) -> Any:
        return picture.convert("L")


class RandomVerticalFlip(RandomHorizontalFlip):
    """Now and then upside down."""

    def __call__(self, picture: Any) -> Any:
        return picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM) if float(torch.rand(1)) < self.p else picture


class ColorJitter:
    """Leaves the colours."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __call__(self, picture: Any) -> Any:
        return picture


GaussianBlur = RandomApply = RandomGrayscale = ColorJitter
