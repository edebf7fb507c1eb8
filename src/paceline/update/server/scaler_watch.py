# SPDX-License-Identifier: Apache-2.0
"""Steps that a GradScaler skips, under rules by which other workers wait for this worker's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class ScalerWatch:
    """Notices steps that the scaler skips: they move nothing, but the clock of this worker has to go on.

    Args:
        scaler: the user's; its `step` is wrapped until `close`.
        progress: gives what changes with each step that is made.
        skipped: called with the optimizer of a step that was skipped.
    """

    def __init__(self, scaler: Any, progress: Callable[[], object], skipped: Callable[[Optimizer], None]) -> None:
        self._scaler, step = scaler, scaler.step

        def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            before = progress()
            result = step(optimizer, *args, **kwargs)
            if progress() == before:
                skipped(optimizer)
            return result

        scaler.step = watched

    def close(self) -> None:
        """Give the scaler its own `step` back."""
        self._scaler.__dict__.pop("step", None)
