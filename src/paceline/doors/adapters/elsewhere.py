# SPDX-License-Identifier: Apache-2.0
"""Optimizers whose step the program makes itself, the settings that it reads, and the check of rules for them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from paceline.errors import CheckpointError, UnsupportedError
from paceline.rules.rule import Rule
from paceline.tuning.names import checked
from paceline.tuning.tunables import ASKED, SCHEDULED, Rates

OWN = ("lr", "momentum", "weight_decay", "eps")
"""Settings that a program may read."""


class Elsewhere(Optimizer):
    """A placeholder for an optimizer that is not torch's: `step` only fires the hooks, after the program's own step."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {})
        _forget(self)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Load the settings that the program had asked for."""
        super().load_state_dict(state_dict)
        _forget(self)


class ElsewhereMomentum(SGD):
    """The same for SGD with known momentum, so that block rules can restart or average it.

    Args:
        parameters: trained by it.
        momentum: of each parameter, in the program's memory.
        decay: factor by which the program multiplies it at each step.
    """

    def __init__(self, parameters: list[nn.Parameter], momentum: list[Tensor], decay: float) -> None:
        super().__init__(parameters, lr=0.0, momentum=decay)
        _forget(self)
        for parameter, tensor in zip(parameters, momentum, strict=True):
            self.state[parameter]["momentum_buffer"] = tensor

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""

    def load_state_dict(self, state_dict: Any) -> None:
        """Copy the saved momentum into the program's memory."""
        views = {parameter: state["momentum_buffer"] for parameter, state in self.state.items()}
        super().load_state_dict(state_dict)
        for parameter, tensor in views.items():
            tensor.copy_(self.state[parameter]["momentum_buffer"])
            self.state[parameter]["momentum_buffer"] = tensor
        _forget(self)


class VariablesState:
    """The variables of an optimizer of Keras, for checkpoints.

    Args:
        name: of the optimizer, for messages.
        owner: has `variables`, each with `assign`.
    """

    def __init__(self, name: str, owner: Any) -> None:
        self._name, self._owner = name, owner

    def state_dict(self) -> dict[str, Any]:
        return {str(k): variable.numpy() for k, variable in enumerate(self._owner.variables)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        variables = list(self._owner.variables)
        if len(variables) != len(state):
            raise CheckpointError(
                f"the {self._name} saved had {len(state)} variables, and this one has {len(variables)}; make the same, "
                "and build it (optimizer.build(variables)), before run.resume()"
            )
        for k, variable in enumerate(variables):
            variable.assign(state[str(k)])


def _forget(optimizer: Optimizer) -> None:
    """Keep only settings that the program has asked for; the others are its own."""
    for group in optimizer.param_groups:
        asked = group.setdefault(ASKED, [])
        for name in ("lr", "weight_decay"):
            if name not in asked:
                group.pop(name, None)
                optimizer.defaults.pop(name, None)


def tuned(optimizer: Optimizer, rates: Rates, name: str, default: float) -> float:
    """The present value of a setting that the program applies itself; from now on it can be tuned.

    Args:
        optimizer: one of those above.
        rates: the factors of its rate.
        name: one of `OWN`.
        default: the program's own value; a rate may follow the program's schedule.
    """
    if name not in OWN:
        raise UnsupportedError(f"the program can read {', '.join(OWN)}, got {name!r}")
    value = float(checked(name, default))
    (group,) = optimizer.param_groups
    if name == "lr":
        group["lr"] = group[SCHEDULED] = value
    elif name not in group[ASKED]:
        group[name] = value
    if name not in group[ASKED]:
        group[ASKED] = [*group[ASKED], name]
    return value * rates.factor(0) * rates.common if name == "lr" else float(group[name])


def check_rule(rule: Rule, momentum: bool) -> None:
    """Refuse rules that make the optimizer's step themselves, or need optimizer state that was not given."""
    if rule.makes_the_step:
        raise UnsupportedError(
            f"{rule.text()} makes the optimizer's step itself, and here the step is your program's own; use a rule "
            "that exchanges blocks (bmuf, diloco, averaging, asgd with a period, easgd), or sync"
        )
    if rule.payload.changes_optimizer_state and not momentum:
        raise UnsupportedError(
            f"{rule.text()} changes the state of the optimizer, which is your program's own; use another rule or "
            'local_state="keep", or pass SGD\'s momentum: attach_arrays(..., momentum=arrays, decay=0.9)'
        )


def refuse_gradients(rule: Rule, who: str, where: str) -> None:
    """Refuse rules that exchange gradients, for a framework that does not expose them."""
    if rule.steps_with_gradients:
        raise UnsupportedError(
            f"{rule.text()} exchanges gradients, which {who} computes and uses {where}; use a rule that exchanges "
            "blocks only (bmuf, diloco, averaging, ..), without warmup"
        )
