# SPDX-License-Identifier: Apache-2.0
"""The recipe for who does not want to choose: block momentum whose period follows measured times."""

from __future__ import annotations

from paceline.errors import RuleError
from paceline.rules.outer import BlockMomentum
from paceline.rules.payload import Delta
from paceline.rules.recipes.base import Dimensions, Recipe, between
from paceline.rules.recipes.blocks import ADAM_BETA1, BMUF
from paceline.rules.rule import Rule
from paceline.rules.schedule import Paced


def auto(
    *,
    share: float = 0.02,
    first: int = 4,
    longest: int = 64,
    gain: float | str = "auto",
    beta1: float | None = ADAM_BETA1,
    warmup: int = 0,
    ramp: int = 0,
    fragments: int = 1,
    overlap: int = 0,
    codec: str = "dense",
    within: str = "",
    dimensions: Dimensions = None,
    reproducible: bool = False,
    chunks: int = 8,
) -> Rule:
    """Block momentum that suits the optimizer, with the least period that keeps exchanges at a share of the time.

    It is `bmuf_adam` for Adam and AdamW, and `bmuf` for other optimizers. Step and exchange are timed on every worker
    in the first blocks, and now and then again; all workers change the period at the same place (`paceline.tuning`).

    Bytes: 2 (N-1)/N * 4 P a block from each worker, and as much again for each of Adam's moments.

    Args:
        share: of the time that exchanges may keep a worker; the period is the least that does it.
        first: minibatches of the first blocks, and of the shortest ones.
        longest: minibatches of the longest blocks, whatever share exchanges then take.
        gain: zeta/(1-eta): "auto" (:mod:`paceline.rules.outer.gain`), "paper" (eta = 1-1/N, zeta = 1) or a number.
        beta1: of Adam and AdamW on the workers, where it is larger and there are several; None leaves it.
        warmup: synchronous steps before the first block.
        ramp: blocks over which eta rises from 0.
        fragments: parts of the model that are exchanged one after another over the block.
        overlap: minibatches that are made while an exchange is under way; 0 waits for it.
        codec: how the delta is written: dense, bf16, fp16, int8, e3m0, one_bit, sign, low_rank, top_k.
        within: "host" makes the processes of a host one worker, which makes synchronous steps inside.
        dimensions: None sums over all at once; "hosts" first within each host; "measured", or sizes like (4, 2).
        reproducible: sum in rank order.
        chunks: pieces into which an exchange is cut.
    """
    if not isinstance(first, int) or isinstance(first, bool) or first < 1:
        raise RuleError(f"first must be a whole number of minibatches, at least 1, got {first!r}")
    schedule = Paced(first, warmup, fragments, overlap, share, first, longest)
    carried = between(within, codec, dimensions, reproducible, chunks)
    return Rule(schedule, Delta("fitting", beta1=beta1), outer=BlockMomentum(gain=gain, ramp=ramp), **carried)


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
