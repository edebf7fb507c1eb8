# SPDX-License-Identifier: Apache-2.0
"""Sums and priors of all workers, which no rule exchanges."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline import Run
from paceline_dual.pair import Pair


def add_up(run: Run, sums: Tensor) -> Tensor:
    """Make a tensor the sum over the workers, in place."""
    run.messages.all_reduce(sums).wait()
    return sums


@torch.no_grad()
def same_priors(run: Run, pair: Pair) -> None:
    """Copy worker 0's priors to all workers: priors are not trained, so no rule exchanges them."""
    if run.world.size == 1:
        return
    for prior in pair.priors:
        for tensor in (*prior.parameters(), *prior.buffers()):
            found = tensor.detach().cpu().clone().contiguous()
            run.messages.broadcast(found).wait()
            tensor.copy_(found)
