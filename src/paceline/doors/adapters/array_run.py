# SPDX-License-Identifier: Apache-2.0
"""A run over tensors that stand for a program's arrays.

The tensors become the parameters of a torch module. Its optimizer has an empty step, since the program makes the step
itself. All else is as in any run.

Under a rule that exchanges gradients the program calls `run.mean(gradients)` before its own step; block rules need the
parameters only. Rules that make the optimizer's step themselves are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.doors.adapters.elsewhere import Elsewhere, ElsewhereMomentum, check_rule, tuned
from paceline.doors.adapters.views import check_apart, named, view
from paceline.errors import UnsupportedError
from paceline.rules.choice import without_probe
from paceline.rules.rule import Rule
from paceline.run.run import Run
from paceline.update.engine.collective.engine import Engine
from paceline.update.engine.settings import Settings

MANY = 1 << 30
UNCHANGED_STEPS = 10
"""After so many steps without a change the arrays are taken for the wrong ones."""


class ArrayModule(nn.Module):
    """Tensors as a module's parameters and buffers, in the same memory."""

    averages_buffers = True

    def __init__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        super().__init__()  # an array may be called "type" or "train", which `register_parameter` refuses
        self._parameters |= {name: nn.Parameter(tensor) for name, tensor in parameters.items()}
        self._buffers |= buffers


class ArrayRun(Run):
    """A run over arrays; made by `attach_arrays`.

    Args:
        parameters: name -> tensor in place of the program's array.
        buffers: the same for arrays that are averaged and not trained.
        rule, settings: of `paceline.attach.prepare`.
        more: momentum and decay, if known.
    """

    _REMEDY = "write into them (w -= rate * g, w[...] = new) instead of making new ones (w = w - rate * g)"

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        rule: Rule,
        settings: Settings,
        *more: Any,
    ) -> None:
        check_apart({**parameters, **buffers})
        holder = ArrayModule(parameters, buffers)
        self._parameters = dict(holder.named_parameters())
        trained = list(self._parameters.values())
        self._stepper: Any = ElsewhereMomentum(trained, *more) if more else Elsewhere(trained)
        check_rule(rule, momentum=bool(more))
        self._averaged = False
        self._unmoved: dict[str, Tensor] = {}
        super().__init__(holder, self._stepper, without_probe(rule), settings)

    def step(self, arrays: Any = None, momentum: Any = None) -> None:
        """Call it after each step of the program; see the run of each kind of arrays."""
        raise NotImplementedError

    def mean(self, gradients: Any) -> Any:
        """Replace the gradients by their mean over the workers, in place, if the rule exchanges them now.

        Call it before the program's own step, with an array for each parameter, in the structure of those attached.
        """
        if not self._gradients_due:
            return gradients
        for name, tensor in self._like("gradient", gradients).items():
            self._parameters[name].grad = tensor
        self._exchange_gradients()
        return gradients

    @property
    def _gradients_due(self) -> bool:
        return not self._closed and self._engine is not None and self._engine.gradients_due

    def _exchange_gradients(self) -> dict[str, Tensor]:
        """The mean of the parameters' gradients, in their memory."""
        assert self._engine is not None
        try:
            self._engine.before_step(self._stepper)
            return {name: p.grad for name, p in self._parameters.items() if p.grad is not None}
        finally:
            self._averaged = True
            for parameter in self._parameters.values():
                parameter.grad = None  # release the program's memory

    def tuned(self, name: str, default: float) -> float:
        """The present value of a setting of the program's own step; call it for each step.

        It is the default until `run.tune` or `paceline tune` changes the setting, on all workers at the same block.
        Settings that no program asks for cannot be tuned.

        >>> import numpy, paceline
        >>> weights = numpy.ones(3)
        >>> run = paceline.attach_arrays([weights], "bmuf")
        >>> run.tuned("lr", 0.5)
        0.5
        >>> _ = run.tune(lr=0.25)
        >>> run.tuned("lr", 0.5), run.tuned("lr", 0.1)  # the program's schedule continues in proportion
        (0.25, 0.05)
        >>> run.close()

        Args:
            name: `lr`, `momentum`, `weight_decay` or `eps`.
            default: the program's value. The default of `lr` may follow a schedule; of the others the first counts.

        Raises:
            RuleError, UnsupportedError: the name or the value is invalid.
        """
        self._check_open()
        return tuned(self._stepper, self._context.tuner.tunables.rates, name, default)

    @property
    def quiet(self) -> bool:
        """Whether the next step neither reads nor writes the parameters."""
        return self._engine is None or (isinstance(self._engine, Engine) and self._engine.quiet_steps > 0)

    @property
    def idle_steps(self) -> int:
        """How many of the next steps the run only counts: it measures no time, and looks at no parameter.

        A caller may then make up for several of them at once, before any other call.
        """
        measured = self._context.tuner.measured
        if measured.chooser is not None or measured.period_controller is not None or self._unmoved:
            return 0
        if self._engine is None:
            return MANY
        return self._engine.idle_steps if isinstance(self._engine, Engine) else 0

    def _unsupported(self, message: str) -> UnsupportedError:
        return UnsupportedError(self.world.sign(message))

    def _like(self, what: str, arrays: Any) -> dict[str, Tensor]:
        """Views by name of arrays with the structure of the parameters."""
        result = {name: view(f"the {what} {name}", array) for name, array in named(arrays).items()}
        self._check_like(what, result)
        return result

    def _check_like(self, what: str, result: Mapping[str, Tensor]) -> None:
        if result.keys() != self._parameters.keys():
            odd = ", ".join(sorted(result.keys() ^ self._parameters.keys()))
            raise self._unsupported(f"the {what}s are not those attached: {odd} are missing on one side")
        for name, tensor in result.items():
            known = self._parameters[name]
            if (tensor.shape, tensor.dtype, tensor.device) != (known.shape, known.dtype, known.device):
                raise self._unsupported(
                    f"the {what} {name} has shape {tuple(tensor.shape)}, {tensor.dtype} on {tensor.device}, and "
                    f"was attached with shape {tuple(known.shape)}, {known.dtype} on {known.device}; keep it so, "
                    "or close the run and attach again"
                )

    def _step(self) -> None:
        """After the program's step: exchange if due."""
        if self._gradients_due and not self._averaged:
            raise self._unsupported(
                f"{self.rule.text()} exchanges gradients now, and got none: call gradients = run.mean(gradients) "
                "before your own step, or use a block rule without warmup"
            )
        self._averaged = False
        self._parts.hooks.made_elsewhere(self._stepper)

    def _watch(self, now: Mapping[str, Tensor]) -> None:
        """Remember the values at attach, to notice a program that trains other arrays than these."""
        if self._engine is not None:
            self._unmoved = {name: tensor.clone() for name, tensor in now.items()}

    def _check_moved(self, now: Mapping[str, Tensor]) -> None:
        """Refuse arrays that are never trained."""
        if any(not torch.equal(now[name], then) for name, then in self._unmoved.items()):
            self._unmoved = {}
        elif self._unmoved and self.minibatches + 1 >= UNCHANGED_STEPS:
            raise self._unsupported(
                f"the arrays attached have not changed in {UNCHANGED_STEPS} steps; {self._REMEDY}, or pass those: "
                "run.step([w])"
            )


def ordered_momentum(
    parameters: Mapping[str, Tensor], momentum: Mapping[str, Tensor], decay: float | None
) -> tuple[list[Tensor], float]:
    """The momentum in the order of the parameters, and its decay; refuses other names and shapes."""
    if decay is None or not 0 < decay < 1:
        raise UnsupportedError(f"decay, the factor of the momentum, must lie above 0 and below 1, got {decay!r}")
    shapes = {name: tuple(t.shape) for name, t in parameters.items()}
    if {name: tuple(t.shape) for name, t in momentum.items()} != shapes:
        raise UnsupportedError(f"momentum must be an array for each of the arrays, in their shapes: {shapes}")
    return [momentum[name] for name in parameters], decay
