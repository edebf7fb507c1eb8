# SPDX-License-Identifier: Apache-2.0
"""Steps that a GradScaler skips, under rules by which other workers wait for this worker's clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


def watch_skipped_steps(
    scaler: Any, progress: Callable[[], object], skipped: Callable[[Optimizer], None]
) -> Callable[[], object]:
    """Call `skipped` for each step that the scaler skips, since this worker's clock has to advance all the same.

    Args:
        scaler: the user's; its `step` is wrapped.
        progress: gives a value that changes with each step that is made.
        skipped: called with the optimizer of a skipped step.

    Returns:
        Restores the scaler's own `step`.
    """
    step = scaler.step

    def watched(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        before = progress()
        result = step(optimizer, *args, **kwargs)
        if progress() == before:
            skipped(optimizer)
        return result

    scaler.step = watched
    return lambda: scaler.__dict__.pop("step", None)
