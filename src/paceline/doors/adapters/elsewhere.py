# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose step is made elsewhere, by the program itself, and the rules that go with them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.errors import UnsupportedError
from paceline.rules.payload import Delta
from paceline.rules.rule import Rule


class Elsewhere(Optimizer):
    """Stands for an optimizer that is not torch's: its step has been made, and `step` fires the hooks."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""


class ElsewhereMomentum(SGD):
    """The same for SGD whose momentum is known, so that block rules can restart or average it.

    Args:
        parameters: what it trains.
        momentum: of each parameter, in the program's memory.
        decay: by which the program multiplies it at each step.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: list[Tensor], decay: float) -> None:
        super().__init__(parameters, lr=0.0, momentum=decay)
        for group in self.param_groups:
            del group["lr"]  # the program's own affair; what is not there cannot be tuned
        for parameter, tensor in zip(parameters, momentum, strict=True):
            self.state[parameter]["momentum_buffer"] = tensor

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Write what was saved into the program's memory."""
        views = {parameter: state["momentum_buffer"] for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        for parameter, tensor in views.items():
            tensor.copy_(self.state[parameter]["momentum_buffer"])
            self.state[parameter]["momentum_buffer"] = tensor


def check_rule(rule: Rule, momentum: bool) -> None:
    """Refuse rules that make the optimizer's step themselves, or ask for state that nobody has shown."""
    payload = rule.payload
    if rule.makes_the_step:
        raise UnsupportedError(
            f"{rule.text()} makes the optimizer's step itself, and here the step is your program's own; use a rule "
            "that exchanges blocks (bmuf, diloco, averaging, asgd with a period, easgd), or sync"
        )
    if not isinstance(payload, Delta) or momentum:
        return
    if payload.adam_only or payload.local_state in ("average", "compensate", "reset"):
        raise UnsupportedError(
            f"{rule.text()} changes what the optimizer keeps, which is your program's own; use another rule or "
            'local_state="keep", or show SGD\'s momentum: attach_arrays(..., momentum=arrays, decay=0.9)'
        )


def refuse_gradients(rule: Rule, who: str, where: str) -> None:
    """Refuse rules that exchange gradients, where a framework keeps them to itself."""
    if rule.steps_with_gradients:
        raise UnsupportedError(
            f"{rule.text()} exchanges gradients, which {who} computes and uses {where}; use a rule that exchanges "
            "blocks only (bmuf, diloco, averaging, ..), without warmup"
        )
