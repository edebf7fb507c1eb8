# SPDX-License-Identifier: Apache-2.0
"""Elastic runs: this worker joins, and loads the state that a live worker sent."""

from __future__ import annotations

from paceline import flow
from paceline.checkpoint import AutoCheckpointer
from paceline.communication import Transport, connect
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
    grow = rule.schedule.grow
    return flow.join(flow.fingerprint(rule, model, owned, settings), settings, grow.first if grow is not None else 0)


def connect_all(
    rule: Rule, model: Modules, owned: Owned, settings: Settings
) -> tuple[Transport, flow.ElasticMembership | None]:
    """Connect to the other workers; with a membership if the run is elastic."""
    if settings.control is None:
        return connect(settings.timeout_s, settings.group, settings.transport, settings.tls), None
    membership = join(rule, model, owned, settings)
    return membership.transport, membership


def take_over_state(
    context: RunContext, elastic: flow.ElasticEngine, state: RunState, checkpointer: AutoCheckpointer | None
) -> None:
    """Load the state that a live worker sent, and any state sent later, when the members change."""

    def load(given: flow.GivenState) -> None:
        loaded = other_workers.read(given, state, context)
        put = elastic.reshard(given)
        context.loaders.follow(loaded["data"][0])
        state.pending = {name: part for name, part in loaded["included"].items() if name not in state.included}
        state.put("the state that a living worker sent", loaded)
        context.tuner.load(loaded["tuning"], asked=False)
        elastic.follow(context.rule)
        put()
        rng.restore(loaded["random"])
        if checkpointer is not None:
            checkpointer.follow()

    elastic.joining.put = load
    elastic.joining.take_given()
