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

from paceline.errors import RuleError

EXPONENT = 0.7
AUTO_LR = 0.7
GROWTH = 0.5


def check_gain(gain: object) -> None:
    """Raise `RuleError` unless `gain` is "auto", "paper" or a positive number."""
    if gain in ("auto", "paper"):
        return
    if not isinstance(gain, (int, float)) or isinstance(gain, bool) or not gain > 0:
        raise RuleError(f'gain must be "auto", "paper" or a number above 0, got {gain!r}')


def check_numbers(momentum: object, lr: object, ramp: object) -> None:
    """Raise `RuleError` for a momentum outside [0, 1), a learning rate not above 0, or a ramp below 0."""
    if momentum is not None and not (_number(momentum) and 0 <= momentum < 1):  # type: ignore[operator]
        raise RuleError(f"momentum must be a number from 0 to below 1, got {momentum!r}")
    if lr is not None and not (_number(lr) and lr > 0):  # type: ignore[operator]
        raise RuleError(f"lr must be a number above 0, got {lr!r}")
    if not isinstance(ramp, int) or isinstance(ramp, bool) or ramp < 0:
        raise RuleError(f"ramp must be a whole number of blocks, at least 0, got {ramp!r}")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@cache  # every block asks
def eta_zeta(
    workers: int,
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


def gain_in_words(eta: float, zeta: float, *, grows: bool) -> str:
    """The gain, and the block from which on it is reached."""
    gain = zeta / (1 - eta)
    since = math.ceil(gain ** (1 / GROWTH) - 1e-9)
    return f"gain {gain:.3g}" + (f" from block {since} on" if grows and since > 1 else "")


def momentum_of(block: int, eta: float, zeta: float, *, grows: bool, ramp: int) -> float:
    """eta_n.

    Args:
        block: n, the first is 1.
        eta: the final momentum.
        zeta: the block learning rate.
        grows: whether the gain is the default's, which grows with the blocks.
        ramp: blocks over which eta rises linearly from 0.
    """
    if grows:
        eta = 1 - zeta / max(zeta, min(zeta / (1 - eta), block**GROWTH))
    return eta * (min(1.0, (block - 1) / ramp) if ramp else 1.0)
