# SPDX-License-Identifier: Apache-2.0
"""How strong an outer step is, and how that follows the number of workers.

A filter Delta <- eta Delta + zeta d moves, under a steady displacement d, by `gain` times d a block:

    gain = zeta / (1 - eta)

One worker's block of tau minibatches gives d; N workers together did N tau. A gain of N (Chen & Huo's eta = 1 - 1/N,
zeta = 1) credits all of them, which is too hot where the mean of N blocks already moves further than one; DiLoCo's
constants make it 7 whatever N is. The default here, in block n (the first is 1), is

    gain_n = min(N^(0.7 - p/2), n^0.5),   zeta = 0.7,   eta_n = 1 - zeta / max(zeta, gain_n)

N^0.7 fitted 4, 16 and 64 workers alike on small language models where there were many blocks. The filter remembers
gain / zeta blocks; n^0.5 keeps that a small part of those that there have been, so that a run of few blocks does not
end with what its first ones brought (records/2026-11-22_blocks). p is the power of the amplification
(:mod:`paceline.rules.outer.diversity`), 0 without it: displacements that are independent are amplified by N^(p/2), so
that amplification and gain together are N^0.7 again.
"""

from __future__ import annotations

import math
from functools import cache
from typing import ClassVar

from paceline.core.parse import check, check_number, check_whole, is_number
from paceline.errors import RuleError

EXPONENT = 0.7
AUTO_LR = 0.7
GROWTH = 0.5


@cache  # every block asks
def eta_zeta(
    workers: float,
    momentum: float | None,
    lr: float | None,
    gain: float | str,
    paper: tuple[float, float],
    amplify: float = 0.0,
) -> tuple[float, float]:
    """(eta, zeta) from what was given.

    Two of (momentum, lr, gain) give the third; numbers go before words. A momentum without an lr and without a gain in
    numbers takes the publication's lr; `gain="paper"` takes whatever is missing from there.

    Args:
        workers: N.
        momentum: eta, or None.
        lr: zeta, or None.
        gain: "auto", "paper" or a number.
        paper: the publication's (eta, zeta) at this N.
        amplify: p.
    """
    if momentum is not None and lr is not None:
        return momentum, lr
    if momentum is not None:
        return momentum, paper[1] if isinstance(gain, str) else gain * (1 - momentum)
    if gain == "paper":
        return paper[0], paper[1] if lr is None else lr
    number = workers ** (EXPONENT - amplify / 2) if isinstance(gain, str) else float(gain)
    zeta = lr if lr is not None else min(AUTO_LR, number)
    if zeta > number:
        raise RuleError(
            f"lr={zeta:g} is larger than the gain of {number:g}, which would need a negative momentum; "
            f"lower lr to {number:g} or less, or raise the gain"
        )
    return 1 - zeta / number, zeta


class MomentumStep:
    """The numbers of an outer step with momentum, whose `momentum`, `lr`, `gain` and `ramp` are given or follow N."""

    momentum: float | None
    lr: float | None
    gain: float | str
    ramp: int
    amplify: float = 0.0
    paper: ClassVar[tuple[float, float] | None] = None  # the publication's (eta, zeta); None where they follow N

    def __post_init__(self) -> None:
        gain, lr = self.gain, self.lr
        fits = gain in ("auto", "paper") or (is_number(gain) and gain > 0)
        check(fits, "gain", '"auto", "paper" or a number above 0', gain)
        if self.momentum is not None:
            check_number("momentum", self.momentum, 0, 1)
        check(lr is None or (is_number(lr) and lr > 0), "lr", "a number above 0", lr)
        check_whole("ramp", self.ramp, 0, "of blocks")
        check_number("amplify", self.amplify, 0, 1, to=True)
        if not isinstance(gain, str):
            self.eta_zeta(2)  # a gain in numbers does not depend on N

    def eta_zeta(self, workers: float) -> tuple[float, float]:
        """(eta, zeta) with N = `workers`, after the first blocks."""
        paper = self.paper or (1 - 1 / workers, 1.0)
        return eta_zeta(workers, self.momentum, self.lr, self.gain, paper, self.amplify)

    @property
    def _grows(self) -> bool:
        """Whether the gain is the default's, which grows with the blocks."""
        return self.gain == "auto" and self.momentum is None

    def momentum_at(self, block: int, workers: float) -> float:
        """eta_n."""
        eta, zeta = self.eta_zeta(workers)
        if self._grows:
            eta = 1 - zeta / max(zeta, min(zeta / (1 - eta), block**GROWTH))
        return eta * (min(1.0, (block - 1) / self.ramp) if self.ramp else 1.0)

    def lr_at(self, block: int, workers: float) -> float:
        """zeta_n."""
        return self.eta_zeta(workers)[1]

    def gain_in_words(self, workers: int) -> str:
        """The gain, and the block from which on it is reached."""
        eta, zeta = self.eta_zeta(workers)
        gain = zeta / (1 - eta)
        since = math.ceil(gain ** (1 / GROWTH) - 1e-9)
        return f"gain {gain:.3g}" + (f" from block {since} on" if self._grows and since > 1 else "")
