# SPDX-License-Identifier: Apache-2.0
"""The loss of an unchanged program: the tensor whose `backward()` is called.

The last ones are kept as tensors, so that no step waits for a device; their mean is logged every few seconds.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from paceline.run.run import Run
from paceline_plugins.zero.patches import Patches

EVERY_S = 2.0
LAST = 32
"""So many losses are averaged."""


class Losses:
    """Those of one worker.

    Args:
        clock: monotonic, seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._at = clock, clock()
        self._now: Tensor | None = None
        self._last: deque[Tensor] = deque(maxlen=LAST)
        self._scaled: tuple[Any, Tensor] | None = None  # what a GradScaler has made, and of which loss

    def install(self, patches: Patches) -> None:
        """Watch the scaling of losses, so that the program's own is logged."""
        patches.replace(torch.amp.GradScaler, "scale", self._scale)

    def _scale(self, original: Any) -> Any:
        def scale(scaler: Any, outputs: Any) -> Any:
            made = original(scaler, outputs)
            if isinstance(outputs, Tensor) and outputs.numel() == 1:
                self._scaled = weakref.ref(made), outputs.detach()
            return made

        return scale

    def backward(self, tensors: Any) -> None:
        """A backward pass from these begins."""
        loss = tensors[0] if isinstance(tensors, (tuple, list)) and len(tensors) == 1 else tensors
        if isinstance(loss, Tensor) and loss.numel() == 1 and loss.layout == torch.strided:
            scaled, self._scaled = self._scaled, None
            self._now = scaled[1] if scaled is not None and scaled[0]() is loss else loss.detach()

    def stepped(self, run: Run) -> None:
        """The optimizer has stepped."""
        if self._now is not None:
            self._last.append(self._now)
            self._now = None
        if self._clock() - self._at >= EVERY_S:
            self.log(run)

    def log(self, run: Run) -> None:
        """Log the mean of the last losses as `loss`."""
        self._at = self._clock()
        if self._last:
            run.log(loss=sum(one.item() for one in self._last) / len(self._last))
            self._last.clear()
