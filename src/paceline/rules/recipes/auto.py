# SPDX-License-Identifier: Apache-2.0
"""The recipe `auto`: measured times make all choices of the rule."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.parse import check_whole
from paceline.rules.outer import BlockMomentum
from paceline.rules.payload import Delta
from paceline.rules.recipes.blocks import BMUF
from paceline.rules.recipes.options import PacedOptions, Recipe, fields, takes
from paceline.rules.rule import Rule
from paceline.rules.schedule import Pace, Paced, Probe
from paceline.rules.schedule.growth import RATE_EXPONENT, make_growth

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(PacedOptions, rate_exponent=RATE_EXPONENT, even=False)
def auto(
    *,
    share: float = 0.02,
    first: int = 4,
    longest: int = 64,
    probe: int = 6,
    sync_rate: float | None = None,
    overlap: int | None = None,
    codec: str | None = None,
    **options: Unpack[PacedOptions],
) -> Rule:
    """The rule that measured times choose: synchronous steps where the network carries them, else block momentum.

    The first steps are synchronous, and timed on every worker; then all choose the same (`paceline.rules.choice`), by
    rough steps. Synchronous steps go on where they keep a worker for at most `share` of the time. Else it is
    `bmuf_adam` for Adam and AdamW, and `bmuf` for other optimizers: dense, else in bf16, with the least period whose
    overlap hides an exchange. Where workers differ in speed, each makes as many minibatches of a block as end together
    (`paceline.rules.schedule.uneven`); where the slowest takes twice as long as the fastest, it has such blocks in
    place of synchronous steps. The choice stays for the run, and a checkpoint holds it. Only where exchanges take three
    times as long, or a third, for a minute, the workers choose the period and the overlap again.

    Where gradients cannot be exchanged (`step(closure)`, several optimizers, a GradScaler, elastic runs, arrays of
    other libraries), it begins with blocks. Among virtual workers without a clock exchanges take no time.

    Bytes: in blocks 2 (N-1)/N * 4 P a block from each worker, and as much again for each of Adam's moments; in
    synchronous steps that of P a step.

    Args:
        share: of the time that exchanges may keep a worker in synchronous steps, or in blocks without overlap.
        first: minibatches of the first blocks, and of the shortest ones.
        longest: minibatches of the longest blocks, whatever time exchanges then take.
        probe: synchronous steps that are timed before the choice; 0 begins with blocks and chooses the period only.
        sync_rate: s of synchronous steps (:mod:`paceline.tuning.sync_scaling`); None is by the optimizer; 0 leaves it
            as it is, and all workers train together from the first step.
        overlap: minibatches that are made while an exchange is under way; None chooses, and begins with 0.
        codec: how the delta is written; None chooses among dense, bf16, int8 and e3m0, and begins with dense.
        warmup: synchronous steps before the choice, if more than `probe`.
        rate_exponent: s, where each of k workers has k^s times the local learning rate of one in blocks; 0 leaves the
            rate.
    """
    check_whole("first", first, 1, "of minibatches")
    timed = None
    if probe != 0 or probe is False:
        timed = Probe(probe, codec=codec is None, overlap=overlap is None, rate=sync_rate)
    grow = make_growth(options["grow"], options["rate_exponent"])
    behind = 0 if overlap is None else overlap
    pace = Pace(share, first, longest)
    schedule = Paced(first, options["warmup"], options["fragments"], behind, pace, timed, grow=grow)
    outer = BlockMomentum(gain=options["gain"], ramp=options["ramp"], amplify=options["amplify"])
    payload = Delta("fitting", beta1=options["beta1"])
    return Rule(schedule, payload, outer=outer, **fields(options, "dense" if codec is None else codec))


AUTO = (
    Recipe(
        "auto",
        "The rule that measured times choose: sync, or bmuf (bmuf_adam for Adam).",
        """g = mean_i g_i                               where  x / (x + c) <= share; else
"""
        + BMUF
        + """
tau = the least whose overlap hides an exchange    (x: seconds that a gradient exchange keeps a worker beyond c,
                                                    those of computing a minibatch)""",
        "those of sync, bmuf and bmuf_adam; the choice is ours",
        "You do not want to choose: it takes sync, bmuf or bmuf_adam by what the network allows, and says why.",
        auto,
    ),
)
