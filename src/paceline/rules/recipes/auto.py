# SPDX-License-Identifier: Apache-2.0
"""The recipe `auto`: block momentum whose period follows measured times."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.errors import RuleError
from paceline.rules.outer import BlockMomentum
from paceline.rules.payload import Delta
from paceline.rules.recipes.base import Recipe
from paceline.rules.recipes.blocks import BMUF
from paceline.rules.recipes.options import PacedOptions, takes, wire
from paceline.rules.rule import Rule
from paceline.rules.schedule import Paced

if TYPE_CHECKING:
    from typing_extensions import Unpack


@takes(PacedOptions)
def auto(*, share: float = 0.02, first: int = 4, longest: int = 64, **options: Unpack[PacedOptions]) -> Rule:
    """Block momentum that suits the optimizer, with the least period that keeps exchanges at a share of the time.

    It is `bmuf_adam` for Adam and AdamW, and `bmuf` for other optimizers. Step and exchange are timed on every worker
    in the first blocks, and now and then again; all workers change the period at the same place (`paceline.tuning`).

    Bytes: 2 (N-1)/N * 4 P a block from each worker, and as much again for each of Adam's moments.

    Args:
        share: of the time that exchanges may keep a worker; the period is the least that does it.
        first: minibatches of the first blocks, and of the shortest ones.
        longest: minibatches of the longest blocks, whatever share exchanges then take.
    """
    if not isinstance(first, int) or isinstance(first, bool) or first < 1:
        raise RuleError(f"first must be a whole number of minibatches, at least 1, got {first!r}")
    warmup, fragments, overlap = options["warmup"], options["fragments"], options["overlap"]
    schedule = Paced(first, warmup, fragments, overlap, share, first, longest)
    outer = BlockMomentum(gain=options["gain"], ramp=options["ramp"], amplify=options["amplify"])
    return Rule(schedule, Delta("fitting", beta1=options["beta1"]), outer=outer, **wire(options))


AUTO = (
    Recipe(
        "auto",
        "bmuf, or bmuf_adam for Adam, with a period from measured times.",
        BMUF
        + """
tau = the least with  e / (e + tau c) <= share     (e: seconds of an exchange, c: of a minibatch)""",
        "those of bmuf and bmuf_adam; the period is ours",
        "You do not want to choose: it takes bmuf or bmuf_adam, and the least period that the network allows.",
        auto,
    ),
)
