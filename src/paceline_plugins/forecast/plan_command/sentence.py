# SPDX-License-Identifier: Apache-2.0
"""Will it pay? One sentence at the end of `paceline plan`, about speed and about what the model learns."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline_plugins.forecast.plan_command.quality import QualityForecast
    from paceline_plugins.forecast.planner.forecast import Forecast

SMALL = 1.05
"""A speed-up below this is none."""
HOW = (
    "what the model learns is not known: run `paceline run --workers 2 --log trial PROGRAM`, and give --log trial here"
)


def sentence(asked: Forecast, quality: QualityForecast | None) -> str:
    """How much faster so many workers are, how much worse the model, and from where on more of them are in vain.

    Args:
        asked: of the recommended rule, at the number of workers that was asked for.
        quality: from the log of a run, or None.
    """
    workers = asked.workers
    if quality is None:
        return f"{_speed(workers, asked.speed_up)}; {HOW}."
    found = {one.workers: (speed_up, one.loss) for speed_up, one in quality.rows}
    if workers not in found:
        most = max(found)
        learns = f"what they learn is not known, since a run of {quality.run.size} tells of at most {most}"
        return f"{_speed(workers, asked.speed_up)}; {learns}{_beyond(quality)}."
    speed_up, loss = found[workers]
    return f"{_speed(workers, speed_up)}, {_loss(quality.loss, loss, quality.alone.loss)}{_beyond(quality)}."


def _speed(workers: int, speed_up: float) -> str:
    count = "1 worker" if workers == 1 else f"{workers} workers"
    if workers > 1 and speed_up < SMALL:
        return f"{count}: no faster than one ({speed_up:.2g} times)"
    return f"{count}: {speed_up:.2g} times as fast" if speed_up < 9.95 else f"{count}: {speed_up:.0f} times as fast"


def _loss(name: str, loss: float, alone: float) -> str:
    """The loss, as a share of what one worker would reach with the same samples."""
    if not (alone > 0 and math.isfinite(loss) and math.isfinite(alone)):
        return f"{name} {loss:.4g} instead of {alone:.4g}"
    percent = max(1, math.ceil(100 * (loss / alone - 1) - 1e-9))
    return f"{name} within {percent} % of one worker's"


def _beyond(quality: QualityForecast) -> str:
    if quality.pays_up_to is None:
        return ""
    return f"; beyond {quality.pays_up_to} workers, each is worth less than half of one"
