# SPDX-License-Identifier: Apache-2.0
"""TensorFlow programs: `paceline.attach_arrays(variables)`, and `run.step()` after each training step.

    run = paceline.attach_arrays(model.trainable_variables, rule="bmuf", period=16)
    for inputs, targets in run.share(batches):
        train_step(inputs, targets)             # your own, a tf.function or not
        run.step()
    run.close()

Nothing outside of TensorFlow may write into a variable. So an exchange reads the values through DLPack, and assigns new
ones (:mod:`.copied`). A tf.function is not traced again for that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from paceline.core.lazy import needed
from paceline.doors.adapters.array_run import ordered_momentum
from paceline.doors.adapters.elsewhere import VariablesState
from paceline.doors.adapters.views import Arrays, named
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.update.engine import exit_handling
from paceline.update.engine.settings import Settings
from paceline_plugins.frameworks.copied import CopiedRun, copies, momentum_key

with needed("the adapter for TensorFlow", "tensorflow"):
    import tensorflow as tf

DTYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "complex128")
Variables = dict[str, Any]


class VariableRun(CopiedRun):
    """A run over variables of TensorFlow; made by `attach_arrays`."""

    _REMEDY = "train those (optimizer.apply_gradients, variable.assign) instead of making new variables"

    def __init__(
        self,
        variables: Arrays,
        buffers: Arrays | None,
        momentum: Arrays | None,
        decay: float | None,
        rule: Rule,
        settings: Settings,
    ) -> None:
        check_eager()
        self._trained = named(variables)
        others = {} if buffers is None else named(buffers)
        if others.keys() & self._trained.keys():
            others = {f"buffer/{name}": variable for name, variable in others.items()}
        speeds = {} if momentum is None else named(momentum)
        self._variables = {**self._trained, **others, **{momentum_key(name): v for name, v in speeds.items()}}
        check_variables(self._variables)
        held = copies(self._newest())
        more: tuple[Any, ...] = ()
        parameters = {name: held[name] for name in self._trained}
        if momentum is not None:
            more = ordered_momentum(parameters, {name: held[momentum_key(name)] for name in speeds}, decay)
        super().__init__(parameters, {name: held[name] for name in others}, rule, settings, *more)
        exit_handling.claim(self._transport, [(None, list(self._trained.items()))])
        self._watch(self._newest_parameters())

    def _newest(self) -> dict[str, Tensor]:
        check_eager()
        return {name: tensor_of(name, variable) for name, variable in self._variables.items()}

    def _newest_parameters(self) -> dict[str, Tensor]:
        return {name: tensor_of(name, variable) for name, variable in self._trained.items()}

    def _replace(self, memory: dict[str, Tensor]) -> None:
        for name, tensor in memory.items():
            self._variables[name].assign(value_of(tensor))

    def step(self, variables: Arrays | None = None, momentum: Arrays | None = None) -> None:
        """Call it after each step of the program, outside of any tf.function; exchanges assign the variables.

        Args:
            variables: those that the program trains now, if they are others than at attach.
            momentum: the same for the momentum.

        Raises:
            UnsupportedError: variables have other shapes than at attach, or those attached have never changed, or the
                call is inside a tf.function; the run continues with the next valid call.
        """
        if self._closed:
            return
        check_eager()
        if variables is not None:
            self._take("variable", {name: name for name in self._trained}, named(variables))
            self._trained, self._unmoved = named(variables), {}
        if momentum is not None:
            self._take("momentum", {name: momentum_key(name) for name in self._trained}, named(momentum))
        if self._unmoved:
            self._check_moved(self._newest_parameters())
        self._advance()

    def _take(self, what: str, keys: dict[str, str], variables: Variables) -> None:
        """Train these from now on, if they are like those attached."""
        check_variables(variables)
        self._check_like(what, {name: tensor_of(name, variable) for name, variable in variables.items()})
        self._variables |= {keys[name]: variable for name, variable in variables.items()}

    def _copy_in(self) -> None:
        self._check_like("variable", self._newest_parameters())  # a variable may have no fixed shape
        super()._copy_in()

    def mean(self, gradients: Any) -> Any:
        """The mean of the gradients over the workers, as new tensors in the same structure; the gradients themselves
        if none is exchanged.

        Call it outside of any tf.function. Of IndexedSlices the mean is dense. None, for a variable that the loss does
        not depend on, stays None if it is None on all workers.
        """
        if not self._gradients_due:
            return gradients
        check_eager()
        given = named(gradients)
        present = {name: dense(value) for name, value in given.items() if value is not None}
        found = {name: tensor_of(f"the gradient {name}", value) for name, value in present.items()}
        absent = given.keys() - present.keys() & self._parameters.keys()
        self._check_like("gradient", {**found, **{name: self._parameters[name] for name in absent}})
        for name, tensor in copies(found).items():
            self._parameters[name].grad = tensor
        means = self._exchange_gradients()
        values = {name: value_of(means[name]) if name in means else None for name in given}
        if isinstance(gradients, Mapping):
            return dict(zip(gradients, values.values(), strict=True))
        return list(values.values())

    def include(self, **objects: Any) -> None:
        """As for any run; of an optimizer of Keras, or a tf.Module, the variables are saved."""
        plain = {
            name: VariablesState(name, thing)
            for name, thing in objects.items()
            if hasattr(thing, "variables") and not hasattr(thing, "state_dict")
        }
        super().include(**{**objects, **plain})

    @contextlib.contextmanager
    def global_model(self) -> Iterator[Any]:
        """Inside, the variables hold the global model (for evaluation); afterwards the worker's own values."""
        own = copies(self._newest())
        self._replace(self.global_state())
        try:
            yield self._trained
        finally:
            self._replace(own)


def tensor_of(name: str, value: Any) -> Tensor:
    """A read-only tensor in the memory of a tensor or variable."""
    if isinstance(value, tf.Variable):
        value = value.read_value()
    if not tf.is_tensor(value):
        raise UnsupportedError(
            f"{name} is a {type(value).__name__} and no tensor of TensorFlow; use tf.convert_to_tensor"
        )
    if not hasattr(value, "numpy"):
        raise UnsupportedError(f"{name} is being traced; call this after the tf.function, not inside")
    if value.dtype.name not in DTYPES:  # the others may end the process
        raise UnsupportedError(
            f"{name} holds {value.dtype.name}, and what can be trained is {', '.join(DTYPES)}; leave it out, or "
            "convert it, e.g. tf.cast(value, 'float32')"
        )
    try:
        tensor = from_dlpack(tf.experimental.dlpack.to_dlpack(value))
    except (tf.errors.OpError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedError(f"{name} of {value.dtype.name} cannot be shared with torch: {error}") from error
    if tensor.device.type != "cpu":
        tf.test.experimental.sync_devices()  # torch reads on a stream of its own
    return tensor


def value_of(tensor: Tensor) -> Any:
    """The tensor's memory as a tensor of TensorFlow; nothing may write to it afterwards."""
    if tensor.device.type != "cpu":
        torch.cuda.synchronize(tensor.device)
    return tf.experimental.dlpack.from_dlpack(to_dlpack(tensor))


def dense(gradient: Any) -> Any:
    """The gradient with zeros for the rows that IndexedSlices leave out."""
    return tf.convert_to_tensor(gradient) if isinstance(gradient, tf.IndexedSlices) else gradient


def check_eager() -> None:
    """Refuse graphs: they would run the call once, when they are traced."""
    if not tf.executing_eagerly():
        raise UnsupportedError(
            "TensorFlow builds a graph here, and paceline's calls are made between steps: call them after the "
            "tf.function and not inside (programs of TensorFlow 1, with sessions, are not supported)"
        )


def check_variables(variables: Variables) -> None:
    """Refuse what is no variable, and variables that belong to more than one device."""
    if tf.distribute.has_strategy():
        raise UnsupportedError(
            "a tf.distribute strategy is in scope, which spreads variables over devices; a worker has one device: "
            "leave the strategy out, and start a process for each device"
        )
    for name, variable in variables.items():
        if isinstance(variable, tf.distribute.DistributedValues):
            raise UnsupportedError(
                f"{name} is a variable of a tf.distribute strategy ({type(variable).__name__}); a worker has one "
                "device: make the variables outside of any strategy, and start a process for each device"
            )
        if not isinstance(variable, tf.Variable):
            raise UnsupportedError(
                f"{name} is a {type(variable).__name__} and no tf.Variable; attach variables alone, since a step "
                "changes them: tf.Variable(value)"
            )
    names = {id(variable): name for name, variable in variables.items()}
    for name, variable in variables.items():
        if names[id(variable)] != name:
            raise UnsupportedError(f"{name} and {names[id(variable)]} are the same variable; attach it once")
    devices = sorted({variable.device for variable in variables.values()})
    if len(devices) > 1:
        raise UnsupportedError(
            f"the variables lie on {' and '.join(devices)}; a worker has one device: start a process for each"
        )
