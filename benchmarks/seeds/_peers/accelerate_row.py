# SPDX-License-Identifier: Apache-2.0
"""accelerate's LocalSGD."""

from __future__ import annotations

import torch
from _emulate import EmulatedModel, sgd

from .fleet import Place
from .setting import Setting, Trainer


def local_sgd(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
    """Parameters averaged once a block."""
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    accelerator = Accelerator(cpu=True)
    wrapped, optimizer = accelerator.prepare(model, sgd(model))
    blocks = LocalSGD(accelerator=accelerator, model=wrapped, local_sgd_steps=setting.period)
    blocks.__enter__()
    x = torch.ones(1, requires_grad=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        accelerator.backward(wrapped(x))
        optimizer.step()
        blocks.step()

    return Trainer(step)
