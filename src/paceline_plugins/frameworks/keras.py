# SPDX-License-Identifier: Apache-2.0
"""Keras 3 on the JAX, torch and TensorFlow backends: one callback.

    model.compile(...)
    paceline = Paceline(model, rule="bmuf", period=16)
    x, y = paceline.part(x, y)                       # this worker's samples
    model.fit(x, y, epochs=5, callbacks=[paceline])  # the global model is in `model` afterwards

Block rules only, since `fit` keeps its gradients to itself. On torch the variables are exchanged in place; on JAX and
TensorFlow only the steps in which an exchange starts or ends read and write them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.core.lazy import needed
from paceline.doors.adapters.arrays import run_over
from paceline.doors.adapters.elsewhere import VariablesState, refuse_gradients
from paceline.errors import UnsupportedError
from paceline.rules.rule import Rule
from paceline.run.attach import prepare
from paceline.run.run import Run

with needed("the adapter for Keras", "keras"):
    import keras


class Paceline(keras.callbacks.Callback):  # type: ignore[misc]
    """Attaches paceline to a built and compiled model, for one call of `fit`.

    All workers start from rank 0's variables. Running means and variances are averaged with them.

    Args:
        model: the model.
        rule: a rule that exchanges blocks.
        settings: as for `paceline.attach`.

    Raises:
        UnsupportedError: the model, the backend or the rule is not supported.
    """

    def __init__(self, model: Any, rule: Rule | str | None = None, **settings: Any) -> None:
        super().__init__()
        chosen, how = prepare(rule, **settings)
        refuse_gradients(chosen, "Keras", "inside fit")
        _check(model)
        self.set_model(model)
        floats = [v for v in model.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
        parameters, buffers = _named("trained", model.trainable_variables), _named("along", floats)
        if keras.backend.backend() == "jax":
            self._adapter: _OnVariables | _OnJax = _OnJax(parameters, buffers, chosen, how)
        else:
            self._adapter = _OnVariables(parameters, buffers, chosen, how)
        # the :class:`paceline.Run`, e.g. for `run.save`, `run.resume` and `run.world`.
        self.run: Run = self._adapter.run
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)  # for a resume
        self.run.include(optimizer=VariablesState("optimizer", model.optimizer))

    def part(self, *arrays: Any) -> Any:
        """This worker's samples of arrays that every worker has; a tuple for several arrays."""
        world = self.run.world
        found = tuple(array[world.rank :: world.size] if world.size > 1 else array for array in arrays)
        return found if len(found) > 1 else found[0]

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Exchange if due."""
        self._adapter.stepped(self.model)

    def on_train_end(self, logs: Any = None) -> None:
        """Close the run; the variables then hold the global model."""
        self._adapter.close()


class _OnVariables:
    """Adapts the variables of torch and TensorFlow, which the trainer changes in place."""

    def __init__(self, parameters: dict[str, Any], buffers: dict[str, Any], rule: Rule, settings: Any) -> None:
        self.run = self._run = run_over(parameters, buffers or None, None, None, rule, settings)

    def stepped(self, model: Any) -> None:
        self._run.step()

    def close(self) -> None:
        self._run.close()


class _OnJax:
    """Adapts variables of JAX arrays, which the trainer holds during an epoch."""

    def __init__(self, parameters: dict[str, Any], buffers: dict[str, Any], rule: Rule, settings: Any) -> None:
        from paceline_plugins.frameworks.immutable import ImmutableRun

        adapter = self

        class VariablesRun(ImmutableRun):
            """Reads the newest arrays from the variables, and writes new ones back."""

            def _newest(self) -> dict[str, Tensor]:
                self.leaves = adapter.read()
                return super()._newest()

            def _replace(self, memory: dict[str, Tensor]) -> None:
                super()._replace(memory)
                adapter.write(self.leaves)

        self._variables = {**parameters, **buffers}
        arrays = {name: v.value for name, v in parameters.items()}
        self.run = VariablesRun(arrays, {name: v.value for name, v in buffers.items()}, rule, settings)

    def read(self) -> dict[str, Any]:
        return {name: v.value for name, v in self._variables.items()}

    def write(self, leaves: dict[str, Any]) -> None:
        for name, array in leaves.items():
            self._variables[name].assign(array)

    def stepped(self, model: Any) -> None:
        if not self.run.quiet:
            model.jax_state_sync()
        self.run.advance(self.run.leaves)

    def close(self) -> None:
        self.run.close()


def _named(kind: str, variables: list[Any]) -> dict[str, Any]:
    """By number and name, since paths may differ between workers."""
    return {f"{kind}/{k}/{v.name.replace('.', '/')}": v for k, v in enumerate(variables)}


def _check(model: Any) -> None:
    backend = keras.backend.backend()
    if backend not in ("jax", "torch", "tensorflow"):
        raise UnsupportedError(
            f"Keras runs on {backend}, and paceline supports jax, torch and tensorflow; set KERAS_BACKEND before keras "
            "is imported"
        )
    if not model.built or not getattr(model, "compiled", False):
        raise UnsupportedError(
            "the model has no variables, or no optimizer, yet: build it (an Input layer does) and call model.compile, "
            "then make the callback"
        )
    if model.steps_per_execution != 1:
        raise UnsupportedError(
            f"steps_per_execution={model.steps_per_execution} makes several steps between two callbacks, and "
            "paceline needs a callback for each; use steps_per_execution=1"
        )
    if keras.distribution.distribution() is not None:
        raise UnsupportedError(
            "a keras.distribution shards the variables; a worker has one device: start a process for each"
        )
