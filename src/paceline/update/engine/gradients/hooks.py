# SPDX-License-Identifier: Apache-2.0
"""Hooks on parameters report when gradients become ready during backward; the user's model needs no wrapper.

torch calls a hook when a parameter's gradient has been accumulated, and a callback when the backward pass is over. A
program may make several passes before a step (accumulation, several losses), so passes are counted: the first whose
gradients are new memory is number 1.

Gradients that other code sets (FSDP's shards, `torch.autograd.grad`) never reach a hook; their
gradients are exchanged before the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from paceline.communication import virtual


class PassEnd:
    """Calls functions at the end of a backward pass, in a fixed order."""

    def __init__(self) -> None:
        self._task: int | None = None
        self._touched: dict[int, Callable[[], None]] = {}

    def expect(self, number: int, call: Callable[[], None]) -> None:
        """Inside a pass: call `call` at its end, after those of lower numbers."""
        task = torch._C._current_graph_task_id()
        if task != self._task:  # an id, not a flag: a failed pass never calls back
            self._task, self._touched = task, {}
            Variable._execution_engine.queue_callback(self._over)
        self._touched[number] = call

    def _over(self) -> None:
        touched, self._touched, self._task = self._touched, {}, None
        for _, call in sorted(touched.items()):
            call()


class BackwardHooks:
    """Hooks on the parameters of one optimizer.

    Args:
        parameters: leaves that require a gradient.
        number: of the optimizer, among those that share `ends`.
        ends: the ends of passes.
        began: called when a pass has accumulated the first of their gradients.
        ready: called with a parameter's index when its gradient was accumulated.
        over: called at the end of a pass that accumulated one of them, in the thread of the pass.
    """

    def __init__(
        self,
        parameters: list[Tensor],
        number: int,
        ends: PassEnd,
        began: Callable[[], None],
        ready: Callable[[int], None],
        over: Callable[[], None],
    ) -> None:
        self._began, self._ready, self._over = began, ready, over
        self._ends, self._number = ends, number
        self._pass: int | None = None
        self._worker = virtual.current()
        self.passes = 0
        self.order: list[int] = []  # of the present or last pass
        self._handles: list[Any] = [
            parameter.register_post_accumulate_grad_hook(self._hook(index))  # type: ignore[no-untyped-call]
            for index, parameter in enumerate(parameters)
            if parameter.is_leaf
        ]

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def seen(parameter: Tensor) -> None:
            if self._worker is not virtual.current():
                return  # a thread of the device, which the virtual scheduler does not control
            task = torch._C._current_graph_task_id()
            if task != self._pass:
                gradient = parameter.grad
                fresh = gradient is not None and gradient._version == 0
                self._pass, self.order = task, []
                self.passes = 1 if fresh else self.passes + 1
                self._ends.expect(self._number, self._over)
                self._began()
            self.order.append(index)
            self._ready(index)

        return seen

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
