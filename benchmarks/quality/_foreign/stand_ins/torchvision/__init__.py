# SPDX-License-Identifier: Apache-2.0
"""A stand-in for torchvision: small pictures that can be learned, and small models under the names of the large ones.

It is there so that programs which ask for MNIST or a ResNet run as they are where nothing can be downloaded. Pictures
of a class are one random picture with noise; `FOREIGN_SAMPLES` says how many there are for training (600).
"""

from . import datasets, io, models, transforms, utils

__all__ = ["datasets", "io", "models", "transforms", "utils"]
__version__ = "0.0"


def set_image_backend(name: str) -> None:
    """There is one."""
