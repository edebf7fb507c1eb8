# SPDX-License-Identifier: Apache-2.0
"""Data sets: a random picture a class, and noise."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from PIL import Image
from torch.utils.data import Dataset

Transform = Callable[[Any], Any] | None
SAMPLES = "FOREIGN_SAMPLES"


def pictures(count: int, classes: int, shape: tuple[int, ...], seed: int) -> tuple[Any, list[int]]:
    """`count` pictures (uint8, of `shape`), classes in turn; the classes' own pictures do not depend on the seed."""
    own = numpy.random.RandomState(7).uniform(0, 255, (classes, *shape))
    draw = numpy.random.RandomState(seed)
    targets = draw.permutation(count) % classes
    noisy = 0.5 * own[targets] + 0.5 * draw.uniform(0, 255, (count, *shape))
    return noisy.astype(numpy.uint8), [int(target) for target in targets]


class VisionDataset(Dataset[Any]):
    """Pictures in memory."""

    shape: tuple[int, ...] = (32, 32, 3)
    classes: Sequence[str] = [f"class {number}" for number in range(10)]

    def __init__(
        self,
        root: str | os.PathLike[str] | None = None,
        train: bool = True,
        transform: Transform = None,
        target_transform: Transform = None,
        download: bool = False,
    ) -> None:
        self.root, self.train, self.transform, self.target_transform = root, train, transform, target_transform
        count = int(os.environ.get(SAMPLES, "600"))
        self.data, self.targets = pictures(count if train else count // 3, 10, self.shape, 1 if train else 2)
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self._shown(Image.fromarray(numpy.asarray(self.data[index])), int(self.targets[index]))

    def _shown(self, picture: Any, target: int) -> tuple[Any, Any]:
        if self.transform is not None:
            picture = self.transform(picture)
        return picture, target if self.target_transform is None else self.target_transform(target)


class MNIST(VisionDataset):
    """28 x 28, grey."""

    shape = (28, 28)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data, self.targets = torch.from_numpy(self.data), torch.tensor(self.targets)  # type: ignore[assignment]


class FashionMNIST(MNIST):
    """The same."""


KMNIST = QMNIST = EMNIST = FashionMNIST


class CIFAR10(VisionDataset):
    """32 x 32, colours."""


class CIFAR100(CIFAR10):
    """The same; ten of the classes are there."""


class FakeData(VisionDataset):
    """Pictures of any size."""

    def __init__(
        self,
        size: int = 1000,
        image_size: tuple[int, int, int] = (3, 224, 224),
        num_classes: int = 10,
        transform: Transform = None,
        target_transform: Transform = None,
        random_offset: int = 0,
    ) -> None:
        self.shape = (*image_size[1:], image_size[0])
        super().__init__(None, True, transform, target_transform)
        count = min(size, int(os.environ.get(SAMPLES, "600")))
        self.data, self.targets = pictures(count, num_classes, self.shape, 1)


class ImageFolder(VisionDataset):
    """Pictures of a folder; each folder in it is a class."""

    def __init__(self, root: str, transform: Transform = None, target_transform: Transform = None) -> None:
        self.root, self.transform, self.target_transform = root, transform, target_transform
        self.classes = sorted(folder.name for folder in Path(root).iterdir() if folder.is_dir())
        self.class_to_idx = {name: number for number, name in enumerate(self.classes)}
        self.samples = [
            (str(file), number)
            for number, name in enumerate(self.classes)
            for file in sorted(Path(root, name).iterdir())
            if file.is_file()
        ]
        self.imgs, self.targets = self.samples, [number for _, number in self.samples]
        self.loader = lambda path: Image.open(path).convert("RGB")

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        path, target = self.samples[index]
        return self._shown(self.loader(path), target)
