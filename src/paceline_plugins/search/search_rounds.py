# SPDX-License-Identifier: Apache-2.0
"""A round of a search (`paceline tune --search`) in a run: it begins with given values and ends with a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from paceline.checkpoint import AutoCheckpointer
from paceline.errors import UnsupportedError
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline_plugins.search.search_round import MUST_RESUME, Round, RoundOver


class SearchRound:
    """Applies a search round's values to a run, and ends it with a checkpoint.

    Args:
        plan: values to begin with, and the exchanges after which the round is over.
        context: what the parts of the run share.
        engine: exchanges by the rule; None with one worker.
        checkpointer: takes the checkpoint with which the round ends.
        close: closes the run.
    """

    def __init__(
        self,
        plan: Round,
        context: RunContext,
        engine: EngineProtocol | None,
        checkpointer: AutoCheckpointer,
        close: Callable[[], None],
    ) -> None:
        self._plan, self._context, self._engine = plan, context, engine
        self._checkpointer, self._close = checkpointer, close
        checkpointer.require_resume(MUST_RESUME)

    def begin(self) -> None:
        """Tune the round's values, on all workers before the next step."""
        tune, world, tuner = self._plan.tune, self._context.transport.world, self._context.tuner
        if not tune:
            return
        tuner.tunables.check(tune)  # on every worker, so that all raise
        request = tuner.ask(tune, revert=False) if world.rank == 0 else None
        if self._engine is not None:
            self._engine.retune()
        if request is not None and not request.applied:
            raise UnsupportedError(world.sign(f"the values of this round cannot be: {request.refused}"))

    def at_iteration_end(self) -> Callable[[], None] | None:
        """A function that takes the checkpoint and ends the program, if one is due; else None."""
        take = self._checkpointer.at_iteration_end()
        return partial(self._end, take) if take is not None else None

    def _end(self, take: Callable[[], None]) -> None:
        take()
        self._close()
        raise RoundOver()
