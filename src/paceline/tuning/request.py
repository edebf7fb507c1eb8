# SPDX-License-Identifier: Apache-2.0
"""A request to change settings of an active run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from paceline.tuning.names import Changes


@dataclass(eq=False)
class TuneRequest:
    """A request to change settings, and its outcome.

    Attributes:
        changes: name -> value.
        revert: whether to undo the last change instead.
        by: the rank that asked; 0 if the period controller did.
        applied: whether it is in effect.
        refused: why it was refused.
        block: blocks exchanged before it took effect.
        minibatch: this worker's minibatches before it took effect; the next one is the first with the new values.
        values: name -> [before, after], once applied.
        why: the period controller's measurements; its changes cannot be undone.
        request_file: name of the file that it came in, if any.
        number: of this worker's requests.
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
        """Whether it is neither applied nor refused yet."""
        return not (self.applied or self.refused)
