# SPDX-License-Identifier: Apache-2.0
"""What timm asks for by name."""

from torch import nn


class FrozenBatchNorm2d(nn.BatchNorm2d):
    """A name to compare types with."""
