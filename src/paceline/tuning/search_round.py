# SPDX-License-Identifier: Apache-2.0
"""A round of a search: a run that begins with given values, makes so many exchanges, keeps a checkpoint, and stops.

`paceline tune --search` asks for it through the environment, so that the program stays what it is. All workers take the
step between the same two exchanges (:mod:`paceline.checkpoint.auto_checkpointer`) and end there, each by `RoundOver`.
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
    """Ends a program whose round is over; it comes from where the program asks for its next batch."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Round:
    """What a run is to do in this round.

    Attributes:
        checkpoint: directory of the round's checkpoint, in place of the program's.
        exchanges: after which it is taken, and the round is over.
        tune: settings to begin with, as for `run.tune`; none where they are in the checkpoint already.
    """

    checkpoint: str
    exchanges: int
    tune: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """As it stands in the environment."""
        return json.dumps(asdict(self))


def round_from_text(text: str) -> Round:
    """What `Round.text` wrote; `UnsupportedError` for anything else."""
    try:
        found = Round(**json.loads(text))
        right = isinstance(found.checkpoint, str) and isinstance(found.exchanges, int) and isinstance(found.tune, dict)
    except (ValueError, TypeError):
        right = False
    if not right:
        raise UnsupportedError(f"PACELINE_ROUND is set by `paceline tune --search` and by nobody else, got {text!r}")
    return found
