# SPDX-License-Identifier: Apache-2.0
"""Where a run cannot begin with a probe, whose steps exchange gradients."""

from __future__ import annotations

from torch.optim import LBFGS, SparseAdam

from paceline.core.flat import Modules, module_list
from paceline.core.optimizer_state import Owned
from paceline.rules.choice import has_probe
from paceline.rules.rule import Rule
from paceline.run.validation import renormalises
from paceline.update.engine.settings import Settings


def problem(rule: Rule, model: Modules, owned: Owned, settings: Settings) -> str:
    """Why gradients cannot be exchanged, the same on all workers; empty if they can.

    `step(closure)` and a GradScaler that was not passed to attach show at the first step only; there the probe ends.

    Args:
        rule: that was asked for.
        model: as the program gave it.
        owned: (optimizer, its named parameters) pairs.
        settings: of the run.
    """
    if not has_probe(rule):
        return "the rule has no probe"
    if rule.settings.ema:
        return "a moving average is taken over blocks"
    optimizer, _ = owned[0]
    if len(owned) > 1:
        return "there are several optimizers"
    if isinstance(optimizer, (LBFGS, SparseAdam)):
        return f"{type(optimizer).__name__} computes gradients inside its step, or sparse ones"
    if optimizer.state:
        return "the optimizer has state already, which only blocks make common"
    if settings.scaler is not None:
        return "a GradScaler makes the steps"
    if rule.settings.within:
        return "the processes of a host train together"
    if settings.round is not None:
        return "it is a round of a search"
    modules = [module for _, root in module_list(model) for module in root.modules()]
    if any(getattr(module, "sparse", False) for module in modules):
        return "an embedding has sparse gradients"
    if any(renormalises(module) for module in modules):
        return "an embedding has max_norm, and changes its weights in the forward pass"
    return ""
