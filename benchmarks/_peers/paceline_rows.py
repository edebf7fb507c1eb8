# SPDX-License-Identifier: Apache-2.0
"""paceline's rules."""

from __future__ import annotations

from collections.abc import Callable

from _emulate import EmulatedModel, plain_step, sgd

from .fleet import Place
from .setting import Setting, Trainer


def build(text: str) -> Callable[[EmulatedModel, Setting, Place], Trainer]:
    """A row of a rule; the text names fields of the setting."""

    def made(model: EmulatedModel, setting: Setting, place: Place) -> Trainer:
        import paceline

        sizes = {"period": setting.period, "fragments": setting.fragments, "fragment_overlap": setting.fragment_overlap}
        optimizer = sgd(model)
        run = paceline.attach(model, optimizer, rule=text.format(**sizes))
        return Trainer(plain_step(model, optimizer), held=run)

    return made
