# SPDX-License-Identifier: Apache-2.0
"""Something that was asked for while a run goes on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.tuning.names import Changes


@dataclass(eq=False)
class TuneRequest:
    """Something that was asked for, and what has become of it.

    Attributes:
        changes: name -> value.
        revert: whether the last change is to be undone instead.
        by: the rank that asked; the first one where all came to it together.
        applied: whether it is in effect.
        refused: why it is not, where it was refused.
        block: blocks that had been exchanged when it took effect.
        minibatch: minibatches of this worker when it took effect: the next one is the first with the new values.
        values: name -> [before, after], when it is in effect.
        why: what was measured, where all came to it together; such a change is no step that can be taken back.
    """

    changes: Changes
    revert: bool
    by: int
    applied: bool = False
    refused: str = ""
    block: int = 0
    minibatch: int = 0
    values: dict[str, list[Any]] | None = None
    request_file: str = ""
    number: int = 0
    why: str = ""

    @property
    def open(self) -> bool:
        """Whether nothing has become of it yet."""
        return not (self.applied or self.refused)
