# SPDX-License-Identifier: Apache-2.0
"""paceline's rules."""

from __future__ import annotations

from collections.abc import Callable

from _emulate import EmulatedModel, plain_step, sgd

from .fleet import Place
from .setting import Setting, Trainer


def build(text: str, least: int | None = None) -> Callable[[EmulatedModel, Setting, Place], Trainer]:
    """A row of a rule; the text names fields of the setting. `least`: the least elements of a chunk, if another."""

    def made(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
        import paceline
        from paceline.update.engine.blocks import outer_state

        outer_state.SMALL_ELEMENTS = least or outer_state.SMALL_ELEMENTS  # of this worker's process
        sizes = {"period": setting.period, "fragments": setting.fragments, "fragment_overlap": setting.fragment_overlap}
        optimizer = sgd(model)
        run = paceline.attach(model, optimizer, rule=text.format(**sizes))
        return Trainer(plain_step(model, optimizer), held=run)

    return made
