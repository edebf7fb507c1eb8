# SPDX-License-Identifier: Apache-2.0
"""A round of a search: a run that starts with given values, makes some exchanges, saves a checkpoint and stops.

`paceline tune --search` requests it through the environment, so that the program stays unchanged. All workers save
between the same two exchanges (:mod:`paceline.checkpoint.auto_checkpointer`) and end there by `RoundOver`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from paceline.checkpoint import AutoCheckpointer
from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import UnsupportedError
from paceline.extensions import Observer
from paceline.rules.rule import Rule
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.engine.settings import Settings

MUST_RESUME = (
    "a search trains in rounds, each of which goes on from a checkpoint; call run.resume() before the training loop"
)


class RoundOver(SystemExit):
    """Ends the program at the end of a round; raised where the program asks for its next batch."""

    def __init__(self) -> None:
        super().__init__(0)


@dataclass(frozen=True)
class Round:
    """One round of a run."""

    checkpoint: str  # directory of the round's checkpoint, in place of the program's
    exchanges: int  # number after which it is saved, and the round ends
    # settings at the start, as for `run.tune`; none if the checkpoint has them.
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


class SearchRound(Observer):
    """Applies a search round's values to a run, and ends it with a checkpoint."""

    @staticmethod
    def check(settings: Settings) -> Settings:
        """The settings with those of the round that `paceline tune --search` started."""
        found = round_from_text(os.environ["PACELINE_ROUND"])
        return replace(settings, round=found, checkpoint=found.checkpoint, every_blocks=found.exchanges, keep=1)

    def __init__(self, rule: Rule, settings: Settings, world: World, loaders: LoaderRegistry, elastic: bool) -> None:
        self._plan: Round = settings.round
        self._begun: tuple[RunContext, EngineProtocol | None, Callable[[], None]] | None = None

    def begin(
        self,
        context: RunContext,
        engine: EngineProtocol | None,
        checkpointer: AutoCheckpointer | None,
        close: Callable[[], None],
    ) -> None:
        """The run is built."""
        self._begun = context, engine, close
        assert checkpointer is not None
        checkpointer.require_resume(MUST_RESUME)

    def resumed(self) -> None:
        """Tune the round's values, on all workers before the next step."""
        tune = self._plan.tune
        if not tune or self._begun is None:
            return
        context, engine, _ = self._begun
        world, tuner = context.transport.world, context.tuner
        tuner.tunables.check(tune)  # on every worker, so that all raise
        request = tuner.ask(tune, revert=False) if world.rank == 0 else None
        if engine is not None:
            engine.retune()
        if request is not None and not request.applied:
            raise UnsupportedError(world.sign(f"the values of this round cannot be: {request.refused}"))

    def saved(self) -> None:
        """End the program: the round's checkpoint is taken."""
        assert self._begun is not None
        self._begun[2]()
        raise RoundOver()
