# SPDX-License-Identifier: Apache-2.0
"""Small models with the parts that programs reach for: `fc`, `classifier`, `features`."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor, nn

STEM, WIDTH = 64, 16
"""Channels; programs put a first convolution of their own before the 64 of a ResNet."""


class ResNet(nn.Module):
    """Two convolutions with batch norm, a mean, a layer."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, STEM, 5, stride=4, bias=False)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.layer1 = nn.Sequential(nn.Conv2d(STEM, WIDTH, 3, stride=2, bias=False), nn.BatchNorm2d(WIDTH))
        self.avgpool = nn.AdaptiveAvgPool2d(4)
        self.fc = nn.Linear(WIDTH * 16, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes)."""
        x = torch.relu(self.layer1(torch.relu(self.bn1(self.conv1(x)))))
        return self.fc(self.avgpool(x).flatten(1))


class VGG(nn.Module):
    """The sequence of a VGG, narrow; a small classifier."""

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for number, deep in enumerate((2, 2, 3, 3, 3)):
            for _ in range(deep):
                layers += [nn.Conv2d(channels, _wide(number), 3, padding=1), nn.ReLU(inplace=True)]
                channels = _wide(number)
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Linear(channels, 16), nn.ReLU(), nn.Linear(16, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes)."""
        return self.classifier(self.features(x).mean((2, 3)))


def _wide(number: int) -> int:
    return (4, 8, 8, 16, 16)[number]


class _Weights(enum.Enum):
    DEFAULT = "default"
    IMAGENET1K_V1 = "v1"


ResNet18_Weights = ResNet34_Weights = ResNet50_Weights = VGG16_Weights = VGG19_Weights = _Weights


def resnet18(pretrained: bool = False, progress: bool = True, *, weights: Any = None, **kwargs: Any) -> ResNet:
    """Always the same one where it is to be trained already."""
    return _made(ResNet, pretrained or weights is not None, **kwargs)


def vgg16(pretrained: bool = False, progress: bool = True, *, weights: Any = None, **kwargs: Any) -> VGG:
    """Always the same one where it is to be trained already."""
    return _made(VGG, pretrained or weights is not None, **kwargs)


def _made(kind: Any, trained: bool, num_classes: int = 1000) -> Any:
    if not trained:
        return kind(num_classes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return kind(num_classes)


resnet34 = resnet50 = resnet101 = resnet152 = resnet18
vgg11 = vgg19 = vgg11_bn = vgg16
