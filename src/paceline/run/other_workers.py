# SPDX-License-Identifier: Apache-2.0
"""Loads a state of other workers: a checkpoint of another number of workers, or the state that a live worker sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from paceline import checkpoint
from paceline.checkpoint import reshard
from paceline.checkpoint.frozen import complete
from paceline.checkpoint.reshard import OldCheckpoint
from paceline.core import rng
from paceline.run.state import RunState, refuse_waiting
from paceline.update import server
from paceline.update.engine import global_model
from paceline.update.engine.context import RunContext


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
