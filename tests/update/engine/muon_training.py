# SPDX-License-Identifier: Apache-2.0
"""A training with Muon for matrices and AdamW for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import paceline
from tests.helpers import FEATURES, State, make_net, state_of


def muon_and_adamw(model: nn.Module) -> list[Optimizer]:
    """Muon for the matrices, AdamW for the biases."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    rest = [p for p in model.parameters() if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


@dataclass
class Training:
    """Steps on minibatches of the worker's own; may save and stop after some of them, or resume.

    Attributes:
        rule: as text; None trains without paceline, as rank 0.
        look: what a test wants to see at the end, before close.
    """

    rule: str | None
    steps: int = 11
    save: Path | None = None
    resume: Path | None = None
    look: Callable[[paceline.Run, list[Any]], Any] | None = None

    def __call__(self) -> tuple[State, Any]:
        torch.set_num_threads(1)
        model = make_net()
        optimizers = muon_and_adamw(model)
        run = paceline.attach(model, optimizers, self.rule, timeout_s=60) if self.rule is not None else None
        if run is not None and self.resume is not None:
            run.resume(self.resume)
        rank = run.world.rank if run is not None else 0
        for step in range(run.minibatches if run is not None else 0, self.steps):
            x = torch.randn(8, FEATURES, generator=torch.Generator().manual_seed(100 * step + rank))
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), x[:, :3].argmax(1)).backward()
            for optimizer in optimizers:
                optimizer.step()
        seen = self.look(run, optimizers) if run is not None and self.look is not None else None
        if run is not None and self.save is not None:
            run.save(self.save)
            run.abandon()
        elif run is not None:
            run.close()
        return state_of(model), seen
