# SPDX-License-Identifier: Apache-2.0
"""A round of a search: a run that starts with given values, makes some exchanges, saves a checkpoint and stops.

`paceline tune --search` requests it through the environment, so that the program stays unchanged. All workers save
between the same two exchanges (:mod:`paceline.checkpoint.auto_checkpointer`) and end there by `RoundOver`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.errors import UnsupportedError

MUST_RESUME = (
    "a search trains in rounds, each of which goes on from a checkpoint; call run.resume() before the training loop"
)


class RoundOver(SystemExit):
    """Ends the program at the end of a round; raised where the program asks for its next batch."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Round:
    """One round of a run.

    Attributes:
        checkpoint: directory of the round's checkpoint, in place of the program's.
        exchanges: number after which it is saved, and the round ends.
        tune: settings at the start, as for `run.tune`; none if the checkpoint has them.
    """

    checkpoint: str
    exchanges: int
    tune: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """Its form in the environment."""
        return json.dumps(asdict(self))


def round_from_text(text: str) -> Round:
    """The inverse of `Round.text`; `UnsupportedError` for any other text."""
    try:
        found = Round(**json.loads(text))
        right = isinstance(found.checkpoint, str) and isinstance(found.exchanges, int) and isinstance(found.tune, dict)
    except (ValueError, TypeError):
        right = False
    if not right:
        raise UnsupportedError(f"PACELINE_ROUND is set by `paceline tune --search` only, got {text!r}")
    return found
