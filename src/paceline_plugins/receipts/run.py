# SPDX-License-Identifier: Apache-2.0
"""The receipts of a run: whether there are any, and the states with which it begins and goes on."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

from paceline.core.flat import local
from paceline.core.world import World
from paceline.data.sharing.loader_registry import LoaderRegistry
from paceline.data.sharing.run_data import PlaceLog
from paceline.rules.rule import Rule
from paceline.update.engine.blocks.fragmented_model import FragmentedModel
from paceline.update.engine.context import RunContext
from paceline.update.engine.protocol import EngineProtocol
from paceline.update.engine.settings import Settings
from paceline_plugins.receipts.observer import GRADIENTS, Receipts, State, plain_state, recomputable, refuse, seeds

logger = logging.getLogger("paceline")

FOLDER, UNTIL = "PACELINE_RECEIPTS", "PACELINE_RECEIPTS_UNTIL"
"""Variables: where the receipts go, and the last exchange of a run that is made again for comparison."""
NEVER = 1 << 40
"""Exchanges from one checkpoint step to the next, in a run that is made again."""


def with_receipts(settings: Settings) -> Settings:
    """The settings with what the environment says; a run that is made again leaves the checkpoints alone."""
    folder = settings.receipts or os.environ.get(FOLDER) or None
    if os.environ.get(UNTIL) and os.environ.get(FOLDER):
        folder = os.environ[FOLDER]
        return replace(settings, receipts=folder, checkpoint=Path(folder) / "steps", every_blocks=NEVER)
    return replace(settings, receipts=folder)


def make(rule: Rule, settings: Settings, world: World, loaders: LoaderRegistry, elastic: bool) -> Receipts | None:
    """The receipts that the settings ask for, or None.

    Raises:
        UnsupportedError: they cannot be written under this rule, or there.
    """
    if settings.receipts is None:
        return None
    refuse(rule, world, elastic)
    why = recomputable(rule, world.size)
    if why and world.rank == 0:
        logger.warning("%s", world.sign(f"a block of this run that is made again may have other bits: {why}"))
    loaders.places = PlaceLog()
    until = os.environ.get(UNTIL)
    return Receipts(Path(settings.receipts), world, loaders.places, int(until) if until else None)


def begin(context: RunContext, engine: EngineProtocol | None) -> None:
    """Write the first receipt."""
    if context.receipts is None or engine is None:
        return
    settings = context.settings
    context.receipts.committed = lambda: engine.steps_committed
    about = {
        "rule": context.rule.text(),
        "seed": settings.seed,
        "guard": str(settings.guard),
        "outer_state": settings.outer_state,
        "environment": seeds(),
    }
    devices = {local(p).device.type for _, named in context.owned for _, p in named}
    place = "" if settings.checkpoint is None else str(settings.checkpoint)
    context.receipts.start(about, place, _state(context, engine), devices)


def resumed(context: RunContext, engine: EngineProtocol | None) -> None:
    """The run goes on from another state."""
    if context.receipts is not None and engine is not None:
        position = engine.exchange_position
        context.receipts.resumed(position.sequence if position is not None else 0, _state(context, engine))


def _state(context: RunContext, engine: EngineProtocol) -> State:
    blocks = getattr(engine, "blocks", None)
    if isinstance(blocks, FragmentedModel) and not context.progress.lockstep:
        return {number: update.state.tensors() for number, update in enumerate(blocks.updates)}
    return {GRADIENTS: plain_state(context.owned, context.model)}
