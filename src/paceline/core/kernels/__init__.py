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
import warnings
from collections.abc import Iterable
from functools import lru_cache

import torch
from torch import Tensor

SWITCH = "PACELINE_TRITON"
"""Set to 0, it switches the kernels off."""


@lru_cache(maxsize=1)
def _found() -> bool:
    return os.environ.get(SWITCH, "1") != "0" and _installed() and _works()


def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def _works() -> bool:
    """Whether a kernel runs: Triton builds its launcher with a C compiler, which a machine may lack."""
    try:
        from paceline.core.kernels.blocks import Factors, step

        theta, mean, b, out = torch.zeros(4, 1, device="cuda").unbind()
        step(theta, mean, b, Factors(0.0, 0.0, 1.0, 0.0, 0.0), out)
        return True
    except Exception as error:
        lines = str(error).strip().splitlines()
        warnings.warn(
            f"Triton's kernels cannot be used, so exchanges take torch's operations, which are slower: "
            f"{type(error).__name__}: {lines[0] if lines else ''}. Install a C compiler, or set {SWITCH}=0",
            stacklevel=2,
        )
        return False


def serve(*given: Tensor) -> bool:
    """Whether the kernels serve these: float32, contiguous, on a CUDA device, where Triton is installed and not off."""
    return all(x.is_cuda and x.dtype == torch.float32 and x.is_contiguous() for x in given) and _found()


def arithmetic(devices: Iterable[torch.device]) -> str:
    """Whose arithmetic serves these devices: "triton" if one of them is CUDA's and the kernels are on, else "torch"."""
    cuda = [device for device in devices if device.type == "cuda"]
    return "triton" if cuda and _found() else "torch"
