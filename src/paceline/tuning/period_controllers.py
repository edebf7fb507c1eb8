# SPDX-License-Identifier: Apache-2.0
"""Makes the controller of the period: by which clock, and whether with the codec."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from paceline.communication import Transport
from paceline.core.optimizer_state import Owned
from paceline.core.world import World
from paceline.rules.choice import LADDER, chooses_codec, worth_it
from paceline.rules.codec import codec_from_text
from paceline.rules.rule import Rule
from paceline.tuning.codec_controller import CodecController
from paceline.tuning.period_controller import PeriodController, block_bytes
from paceline.tuning.timers import NoTimer, SimulatedTimer, Timer, WallTimer

logger = logging.getLogger("paceline")
TWO = World(0, 2, 0, 1, "one", ("one", "two"))
"""For what codecs send, in proportion; the number of workers of an elastic run changes."""


def period_controller_for(
    rule: Rule, transport: Transport, owned: Owned, buffers: int, exchanged: Sequence[float]
) -> PeriodController | None:
    """The controller of one of several workers; None under rules whose period does not follow measured times.

    Args:
        rule: the rule.
        transport: the connection.
        owned: (optimizer, its named parameters) pairs.
        buffers: elements of averaged buffers.
        exchanged: as for :class:`paceline.tuning.timers.WallTimer`.
    """
    schedule, world, cluster = rule.schedule, transport.world, transport.cluster
    if not schedule.follows_times:
        return None
    timer: Timer = NoTimer()
    if cluster is None:
        timer = WallTimer(exchanged)
    elif cluster.timed:
        nbytes = block_bytes(rule, world, owned, buffers, world.rank)
        timer = SimulatedTimer(cluster.clock, rule.blocks, world.rank, world.size, nbytes)
    elif world.rank == 0:
        logger.warning(
            "virtual workers have no times of their own, so the period stays at %d; "
            "simulate(.., clock=Clock(..)) gives them a clock",
            schedule.period,
        )
    if chooses_codec(rule):
        coded = {codec: replace(rule, codec=codec_from_text(codec)) for codec, _ in LADDER}
        sent = {codec: block_bytes(one, TWO, owned, buffers, 0) for codec, one in coded.items()}
        return CodecController(timer, {codec: sent[codec] for codec in worth_it(sent)})
    return PeriodController(timer)
