# SPDX-License-Identifier: Apache-2.0
"""Programs whose parameters are arrays of any library: `attach_arrays`, and `run.step()` after each minibatch.

The arrays become the parameters of a torch module, without a copy (:mod:`.views`). Its optimizer has an empty step,
since the program makes the step itself. All else is as in any run.

Under a rule that exchanges gradients the program calls `run.mean(gradients)` before its own step; block rules need the
parameters only. Rules that make the optimizer's step themselves are not supported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.doors.adapters.elsewhere import Elsewhere, ElsewhereMomentum, check_rule, tuned
from paceline.doors.adapters.views import Arrays, check_apart, named, view
from paceline.errors import UnsupportedError
from paceline.rules.choice import without_probe
from paceline.rules.rule import Rule
from paceline.run.attach import prepare
from paceline.run.run import Run
from paceline.update.engine import exit_handling
from paceline.update.engine.collective.engine import Engine
from paceline.update.engine.settings import Settings

UNCHANGED_STEPS = 10
"""After so many steps without a change the arrays are taken for the wrong ones."""


class ArrayModule(nn.Module):
    """Tensors as a module's parameters and buffers, in the same memory."""

    def __init__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in parameters.items():
            self.register_parameter(name, nn.Parameter(tensor))
        for name, tensor in buffers.items():
            self.register_buffer(name, tensor)


class ArrayRun(Run):
    """A run over arrays; made by `attach_arrays`.

    Args:
        parameters: name -> tensor in the memory of the program's array.
        buffers: the same for arrays that are averaged and not trained.
        rule, settings: of `paceline.attach.prepare`.
        more: momentum and decay, if known.
    """

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
        super().__init__(holder, self._stepper, without_probe(rule), settings)

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
        return self._engine is not None and self._engine.gradients_due

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
        return self._engine is None or (isinstance(self._engine, Engine) and self._engine.quiet)

    def _unsupported(self, message: str) -> UnsupportedError:
        return UnsupportedError(self.world.sign(message))

    def _like(self, what: str, arrays: Any) -> dict[str, Tensor]:
        """Views by name of arrays with the structure of the parameters."""
        found = {name: view(f"the {what} {name}", array) for name, array in named(arrays).items()}
        self._check_like(what, found)
        return found

    def _check_like(self, what: str, found: Mapping[str, Tensor]) -> None:
        if found.keys() != self._parameters.keys():
            odd = ", ".join(sorted(found.keys() ^ self._parameters.keys()))
            raise self._unsupported(f"the {what}s are not those attached: {odd} are missing on one side")
        for name, tensor in found.items():
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
        self._stepper.step()


class WritableRun(ArrayRun):
    """A run over arrays that it changes in place; made by `attach_arrays`."""

    def __init__(
        self,
        arrays: Arrays,
        buffers: Arrays | None,
        momentum: Arrays | None,
        decay: float | None,
        rule: Rule,
        settings: Settings,
    ) -> None:
        self._arrays = named(arrays)
        tensors = {name: view(name, array) for name, array in self._arrays.items()}
        others = {} if buffers is None else {name: view(name, array) for name, array in named(buffers).items()}
        if others.keys() & tensors.keys():
            others = {f"buffer/{name}": tensor for name, tensor in others.items()}
        more = () if momentum is None else _checked_momentum(tensors, momentum, decay)
        self._unmoved: dict[str, Tensor] = {}
        super().__init__(tensors, others, rule, settings, *more)
        exit_handling.claim(self._transport, [(None, list(self._arrays.items()))])
        if self._engine is not None:
            self._unmoved = {name: tensor.clone() for name, tensor in tensors.items()}

    def step(self, arrays: Arrays | None = None, momentum: Arrays | None = None) -> None:
        """Call it after each step of the program; exchanges change the arrays in place.

        Args:
            arrays: the parameters, if the step made new arrays; None if it wrote into those attached.
            momentum: the same for the momentum.

        Raises:
            UnsupportedError: arrays have other shapes than at attach, or those attached have never changed; the run
                continues with the next valid call.
        """
        if self._closed:
            return
        if arrays is None:
            self._check_place()
        else:
            given, found = named(arrays), self._like("array", arrays)
            self._check_strides(found)
            for name, tensor in found.items():
                self._parameters[name].data = tensor
            self._arrays, self._unmoved = given, {}
        if momentum is not None:
            for name, tensor in self._like("momentum", momentum).items():
                self._stepper.state[self._parameters[name]]["momentum_buffer"] = tensor
        self._step()

    def _check_strides(self, found: Mapping[str, Tensor]) -> None:
        """Refuse another memory order than at attach, since arrays are exchanged in memory order."""
        for name, tensor in found.items():
            known = self._parameters[name].stride()
            if tensor.stride() != known and tensor.numel() > 1:
                raise self._unsupported(
                    f"the array {name} has strides {tensor.stride()} and was attached with {known}; keep its "
                    "order, e.g. with numpy.ascontiguousarray"
                )

    def _check_place(self) -> None:
        """Refuse arrays that changed their shape, or that are never trained."""
        for name, array in self._arrays.items():
            known = self._parameters[name]
            if tuple(array.shape if hasattr(array, "shape") else known.shape) != tuple(known.shape):
                raise self._unsupported(
                    f"the array {name} had shape {tuple(known.shape)} at attach and has {tuple(array.shape)} now; "
                    "keep its shape while it is attached"
                )
        if self._unmoved:
            if any(not torch.equal(self._parameters[name], then) for name, then in self._unmoved.items()):
                self._unmoved = {}
            elif self.minibatches + 1 >= UNCHANGED_STEPS:
                raise self._unsupported(
                    f"the arrays attached have not changed in {UNCHANGED_STEPS} steps; write into them (w -= rate "
                    "* g, w[...] = new) instead of making new ones (w = w - rate * g), or pass those: run.step([w])"
                )

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """Inside, the arrays hold the global parameters (for evaluation); afterwards the worker's own."""
        with super().global_model():
            yield self._arrays


def attach_arrays(
    arrays: Arrays,
    rule: Rule | str | None = None,
    *,
    buffers: Arrays | None = None,
    momentum: Arrays | None = None,
    decay: float | None = None,
    **settings: Any,
) -> WritableRun:
    """Attach paceline to a program whose parameters are arrays; call `run.step()` after each of its steps.

    All workers start from rank 0's arrays, and exchanges change the arrays in place, without a copy. One worker
    exchanges nothing, and the program is unchanged.

    >>> import numpy, paceline
    >>> weights = numpy.ones(3)
    >>> run = paceline.attach_arrays([weights], "bmuf", period=4)
    >>> for inputs in run.share([numpy.eye(3)] * 8):
    ...     weights -= 0.1 * inputs @ weights
    ...     run.step()
    >>> run.close()
    >>> run.minibatches
    8

    Args:
        arrays: a list or a dictionary of arrays of floating-point numbers: NumPy's, and writable arrays with DLPack
            or the buffer protocol. (For JAX see :mod:`paceline.doors.adapters.jax`.)
        rule: as for `attach`. Where it exchanges gradients, call `gradients = run.mean(gradients)` before your step.
        buffers: arrays that block rules average and do not train, such as running means.
        momentum: your program's momentum, an array for each of `arrays`. Block rules then treat it as torch's SGD
            momentum: it restarts with each block, or is averaged, by `local_state`. Else it is kept.
        decay: factor by which your program multiplies the momentum at each step.
        settings: other settings of `attach`, and the rule's.

    Raises:
        UnsupportedError: an array or the rule is not supported; nothing has been changed.
        MismatchError: the workers' arrays differ in names, shapes or dtypes (on every worker alike).
    """
    return WritableRun(arrays, buffers, momentum, decay, *prepare(rule, **settings))


def _checked_momentum(
    tensors: Mapping[str, Tensor], momentum: Arrays, decay: float | None
) -> tuple[list[Tensor], float]:
    """Views of the momentum, in the order of the parameters, and its decay."""
    if decay is None or not 0 < decay < 1:
        raise UnsupportedError(f"decay, the factor of the momentum, must lie above 0 and below 1, got {decay!r}")
    found = {name: view(f"the momentum {name}", array) for name, array in named(momentum).items()}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if {name: tuple(t.shape) for name, t in found.items()} != shapes:
        raise UnsupportedError(f"momentum must be an array for each of the arrays, in their shapes: {shapes}")
    return [found[name] for name in tensors], decay
