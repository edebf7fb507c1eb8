# SPDX-License-Identifier: Apache-2.0
"""A round of a search (`paceline tune --search`) in a run: it begins with given values and ends with a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from paceline.checkpoint import AutoCheckpointer
from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.errors import UnsupportedError
from paceline.extensions import Observer
from paceline.rules.rule import Rule
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.engine.settings import Settings
from paceline_plugins.search.search_round import MUST_RESUME, Round, RoundOver, round_from_text


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
