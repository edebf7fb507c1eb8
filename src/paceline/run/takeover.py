# SPDX-License-Identifier: Apache-2.0
"""Elastic runs: this worker joins, and loads the state that a live worker sent."""

from __future__ import annotations

from paceline import flow
from paceline.checkpoint import AutoCheckpointer
from paceline.core import rng
from paceline.core.flat import Modules
from paceline.core.optimizer_state import Owned
from paceline.rules.rule import Rule
from paceline.run import other_workers
from paceline.run.state import RunState
from paceline.update.engine.context import RunContext
from paceline.update.engine.settings import Settings


def join(rule: Rule, model: Modules, owned: Owned, settings: Settings) -> flow.ElasticMembership:
    """Become a worker of the elastic run whose control plane the settings name."""
    flow.check_rule(rule)
    return flow.join(flow.fingerprint(rule, model, owned, settings), settings)


class TakeOver:
    """Loads the state that a live worker sent to this joining worker.

    Args:
        context: what the parts of the run share.
        elastic: the engine.
        state: of this worker.
        checkpointer: keeps the run's steps, or None.
    """

    def __init__(
        self, context: RunContext, elastic: flow.ElasticEngine, state: RunState, checkpointer: AutoCheckpointer | None
    ) -> None:
        self._context, self._elastic, self._state, self._checkpointer = context, elastic, state, checkpointer

    def begin(self) -> None:
        """Load the state received so far, and states sent later, when the members change."""
        self._elastic.joining.put = self.load
        self._elastic.joining.take_given()

    def load(self, given: flow.GivenState) -> None:
        """Load the sent state; objects passed to `include` later load theirs then."""
        context, state = self._context, self._state
        loaded = other_workers.read(given, state, context)
        put = self._elastic.reshard(given)
        context.loaders.follow(loaded["data"][0])
        state.pending = {name: part for name, part in loaded["included"].items() if name not in state.included}
        state.put("the state that a living worker sent", loaded)
        context.tuner.load(loaded["tuning"], asked=False)
        self._elastic.follow(context.rule)
        put()
        rng.restore(loaded["random"])
        if self._checkpointer is not None:
            self._checkpointer.follow()
