# SPDX-License-Identifier: Apache-2.0
"""The claims of the middleware."""

from __future__ import annotations

from functools import partial

from _article_claims import (
    COUNTING,
    FRAMES,
    NETWORK,
    TOOL,
    Claim,
    at_least,
    at_most,
    frames,
    miscounted,
    read,
)

AVERAGE = (
    "at three times the rate 3.5 and 5.5 %; with the step beyond the mean, block momentum's, 0.5 and 0.7 % (rate.json)"
)


def dnn(cards: int, says: str, most: float) -> tuple[Claim, Claim]:
    """The middleware's network on frames with averaging, and with block momentum in its place."""
    title, asks = f"DNN, averaging, {cards} cards: {says} more frame errors", "at most as many more"
    averaging, momentum = partial(frames, "averaging", cards), partial(frames, "cold", cards)
    instead = "the same, with block momentum in its place"
    return (
        Claim("middleware", title, asks, averaging, at_most(most), FRAMES, AVERAGE, "share"),
        Claim("middleware", instead, asks, momentum, at_most(most), FRAMES, unit="share"),
    )


CLAIMS = (
    *dnn(8, "0.7 %", 0.0075),
    *dnn(16, "2 %", 0.02),
    Claim(
        "middleware",
        "a tool of C++ with averaging, 8 cards",
        "fewer held-out errors than alone",
        lambda: read(TOOL, "workers.json")["error_ratio"]["averaging"]["8"],
        at_most(1.0),
        TOOL,
    ),
    Claim(
        "middleware",
        "ASGD, 4 cards: better than one",
        "fewer held-out errors than alone, C++ tool",
        lambda: read(TOOL, "workers.json")["error_ratio"]["asgd"]["4"],
        at_most(1.0),
        TOOL,
    ),
    Claim(
        "middleware",
        "8 cards: 7.2 times as fast",
        "efficiency of blocks, 8 hosts at 1 Gbit/s",
        lambda: 8 * read(NETWORK, "network_scale8.json")["efficiency"]["bmuf"],
        at_least(7.2),
        NETWORK,
        unit="x",
    ),
    Claim(
        "middleware",
        "few lines change in the tool",
        "at most 10 lines of C++",
        lambda: read(TOOL, "cost.json")["changed_lines"],
        at_most(10),
        TOOL,
        unit="lines",
    ),
    Claim(
        "middleware",
        "no sample is used twice",
        "lost or repeated samples, 98 kills",
        miscounted,
        at_most(0),
        COUNTING,
    ),
)
