# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for CUDA tensors: what takes torch several passes over memory takes one here.

Every kernel does what a few lines of torch say elsewhere (:mod:`paceline.rules.codec`, :mod:`paceline.rules.outer`, the
packing of outer state), and these lines serve every other device. Triton comes with torch's CUDA builds, and no extra
of paceline's installs it.

The environment variable `PACELINE_TRITON=0` switches all of them off. Workers whose models must stay the same bits
have to use the same arithmetic, so they compare :func:`arithmetic` when they attach.

Kernels neither contract a product and a sum by themselves nor divide approximately: where one rounding is meant, it is
written as `tl.fma`, as torch's `add` with `alpha` computes on a GPU.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

SWITCH = "PACELINE_TRITON"
"""Set to 0, it switches the kernels off."""


@lru_cache(maxsize=1)
def _found() -> bool:
    return os.environ.get(SWITCH, "1") != "0" and importlib.util.find_spec("triton") is not None


def serve(x: Tensor) -> bool:
    """Whether the kernels serve `x`: float32, contiguous, on a CUDA device, where Triton is installed and not off."""
    return x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() and _found()


def arithmetic(devices: Iterable[torch.device]) -> str:
    """Whose arithmetic serves these devices: "triton" if one of them is CUDA's and the kernels are on, else "torch"."""
    return "triton" if any(device.type == "cuda" for device in devices) and _found() else "torch"
