# SPDX-License-Identifier: Apache-2.0
"""Connects a run, and loads a state of other workers: a checkpoint of another number of workers, or, in an elastic run,
the state that a live worker sent to this one, which joins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from paceline import checkpoint, flow
from paceline.checkpoint import AutoCheckpointer, reshard
from paceline.checkpoint.frozen import complete
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.communication import Transport, connect
from paceline.core import rng
from paceline.core.flat import Modules
from paceline.core.optimizer_state import Owned
from paceline.rules.rule import Rule
from paceline.run.state import RunState, refuse_waiting
from paceline.update import server
from paceline.update.engine import global_model
from paceline.update.engine.context import RunContext
from paceline.update.engine.settings import Settings


def load_resharded(path: str | Path, old: OldCheckpoint, state: RunState, context: RunContext) -> None:
    """Resume from a checkpoint of another number of workers.

    Reads and checks everything first; changes this run only after all workers have done so.
    """
    problem, loaded, put = "", {}, None
    try:
        state.check_included(path, old.keys(0, "included"))
        loaded = read(old, state, context)
        put = state.engine.reshard(old) if state.engine is not None else None
    except (OSError, ValueError, SafetensorError) as error:  # reported to all workers below
        problem = str(error)
    checkpoint.all_well(context.transport, problem, f"{path} cannot be resumed")
    context.loaders.regroup(loaded["data"])  # first, because it may raise
    state.put(path, loaded)
    context.tuner.load(loaded["tuning"], asked=False)
    if put is not None and state.engine is not None:
        state.engine.follow(context.rule)
        put()
    for observer in context.observers:
        observer.load(context, state.engine)
    context.transport.barrier()
    rng.restore(loaded["random"])


def read(old: OldCheckpoint, state: RunState, context: RunContext) -> dict[str, Any]:
    """This worker's initial state without the engine's; checked against its model and optimizers."""
    model = old.model()
    own = global_model.plain_state(context.model)
    complete(model, {name: old.part(0, name) for name in ("frozen", "tied")}, own, old.read_frozen)
    found = {
        "model": model,
        "optimizers": _optimizers(old, state, context),
        "included": old.part(0, "included"),
        "flow": old.part(0, "flow"),
        "tuning": old.part(0, "tuning"),
        "data": [old.part(rank, "data") for rank in range(old.size)],
        "random": reshard.random_state(old, context.transport.world.rank, context.settings.seed),
    }
    state.check(found)
    refuse_waiting(old.part(0, "exchange", "growth"), old.size)
    return found


def _optimizers(old: OldCheckpoint, state: RunState, context: RunContext) -> list[dict[str, Any]]:
    """State dictionaries for the optimizers: the mean of the workers', or rank 0's if all were equal."""
    at_owners = context.rule.steps_at_owners
    if at_owners and state.engine is None:
        return server.whole_optimizers(old, context.model, context.owned, context.rule.sharded)
    apart = not at_owners and not context.rule.schedule.is_lockstep(bool(old.part(0, "flow", 1)))
    if state.blocks is not None and not state.blocks.keeps_state:
        apart = False  # each block starts with fresh optimizer state
    found: list[dict[str, Any]] = reshard.mean_optimizers(old) if apart else old.part(0, "optimizers")
    return found


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
        loaded = read(given, state, context)
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
