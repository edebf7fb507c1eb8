# SPDX-License-Identifier: Apache-2.0
"""Programs whose parameters are arrays of any library: `attach_arrays`, and `run.step()` after each minibatch.

Arrays that can be written to are exchanged where they lie, without a copy (:mod:`.views`). Variables of TensorFlow are
exchanged through copies (:mod:`.tensorflow`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.doors.adapters.array_run import ArrayRun, ordered_momentum
from paceline.doors.adapters.views import Arrays, library, named, view
from paceline.extensions import ARRAYS, extension
from paceline.rules.rule import Rule
from paceline.run.attach import prepare
from paceline.update.engine import exit_handling
from paceline.update.engine.settings import Settings


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
        self._shaped = _with_shapes(self._arrays)
        tensors = {name: view(name, array) for name, array in self._arrays.items()}
        others = {} if buffers is None else {name: view(name, array) for name, array in named(buffers).items()}
        if others.keys() & tensors.keys():
            others = {f"buffer/{name}": tensor for name, tensor in others.items()}
        more: tuple[Any, ...] = ()
        if momentum is not None:
            speeds = {name: view(f"the momentum {name}", array) for name, array in named(momentum).items()}
            more = ordered_momentum(tensors, speeds, decay)
        super().__init__(tensors, others, rule, settings, *more)
        exit_handling.claim(self._transport, [(None, list(self._arrays.items()))])
        self._watch(tensors)

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
            given, result = named(arrays), self._like("array", arrays)
            self._check_strides(result)
            with torch.no_grad():
                for name, tensor in result.items():
                    self._parameters[name].set_(tensor)  # type: ignore[call-overload]
            self._arrays, self._shaped, self._unmoved = given, _with_shapes(given), {}
        if momentum is not None:
            for name, tensor in self._like("momentum", momentum).items():
                self._stepper.state[self._parameters[name]]["momentum_buffer"] = tensor
        self._step()

    def _check_strides(self, result: Mapping[str, Tensor]) -> None:
        """Refuse another memory order than at attach, since arrays are exchanged in memory order."""
        for name, tensor in result.items():
            known = self._parameters[name].stride()
            if tensor.stride() != known and tensor.numel() > 1:
                raise self._unsupported(
                    f"the array {name} has strides {tensor.stride()} and was attached with {known}; keep its "
                    "order, e.g. with numpy.ascontiguousarray"
                )

    def _check_place(self) -> None:
        """Refuse arrays that changed their shape, or that are never trained."""
        for name, array in self._shaped.items():
            known = self._parameters[name]
            if tuple(array.shape) != tuple(known.shape):
                raise self._unsupported(
                    f"the array {name} had shape {tuple(known.shape)} at attach and has {tuple(array.shape)} now; "
                    "keep its shape while it is attached"
                )
        self._check_moved(self._parameters)

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """Inside, the arrays hold the global parameters (for evaluation); afterwards the worker's own."""
        with super().global_model():
            yield self._arrays


def _with_shapes(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Those whose shape could change."""
    return {name: array for name, array in arrays.items() if hasattr(array, "shape")}


def attach_arrays(
    arrays: Arrays,
    rule: Rule | str | None = None,
    *,
    buffers: Arrays | None = None,
    momentum: Arrays | None = None,
    decay: float | None = None,
    **settings: Any,
) -> ArrayRun:
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
        arrays: a list or a dictionary of arrays of floating-point numbers: NumPy's, CuPy's, and writable arrays with
            DLPack, the array interface of NumPy or CUDA, or the buffer protocol; or `tf.Variable`s, whose values an
            exchange reads and assigns. (For JAX see :mod:`paceline_plugins.frameworks.jax`.)
        rule: as for `attach`. Where it exchanges gradients, call `gradients = run.mean(gradients)` before your step.
        buffers: arrays that block rules average and do not train, such as running means.
        momentum: your program's momentum, an array for each of `arrays`, for a rule that resets, averages or
            compensates it (`local_state`). Else each worker keeps it.
        decay: factor by which your program multiplies the momentum at each step.
        settings: other settings of `attach`, and the rule's.

    Raises:
        UnsupportedError: an array or the rule is not supported; nothing has been changed.
        MismatchError: the workers' arrays differ in names, shapes or dtypes (on every worker alike).
    """
    run: ArrayRun = run_over(arrays, buffers, momentum, decay, *prepare(rule, **settings))
    return run


def run_over(arrays: Arrays, *others: Any) -> Any:
    """A run of the kind that serves the arrays; its arguments."""
    if any(library(array) == "tensorflow" for array in named(arrays).values()):
        return extension(ARRAYS, "tensorflow")(arrays, *others)
    return WritableRun(arrays, *others)
