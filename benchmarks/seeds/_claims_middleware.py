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
    cell,
    cells,
    frames,
    miscounted,
    read,
)

AVERAGE = (
    "at three times the rate 3.5 and 5.5 % (seed 0, rate.json); with the step beyond the mean, block momentum's, 0.5 "
    "and 0.3 %; with 4 cards it is 1.5 % (seed 0, four.json)"
)
TABLES = "2026-11-26_middleware"
CHAT = "half of one worker's samples cost 0.5 %; with twice the samples 0.1 % fewer (chat_longer.json)"
BLSTM = "averaging has no step beyond the mean; at one worker's rate, not raised with N, 4.6 % (blstm_seeds.json)"
RATE = "at one worker's rate, not raised with N, 0.4 % (blstm_seeds.json)"
CNN = (
    "far from its plateau, half of one worker's samples cost 18 %; with a half and a quarter of them averaging loses "
    "24 and 44 %, block momentum 13 and 29 %"
)
WAITS = "a model of 10 M; each worker waits for its answer, as in the simulation; at 40 Gbit/s 3.8 times"


def dnn(cards: int, says: str, most: float) -> tuple[Claim, Claim]:
    """The middleware's network on frames with averaging, and with block momentum in its place."""
    title, asks = (
        f"DNN, averaging, {cards} cards: {says} more frame errors",
        "at most as many more, mean of three seeds",
    )
    file = {8: "seeds_eight.json", 16: "seeds.json"}[cards]
    averaging, momentum = (partial(frames, method, cards, file=file) for method in ("averaging", "cold"))
    instead = "the same, with block momentum in its place"
    return (
        Claim("middleware", title, asks, averaging, at_most(most), FRAMES, AVERAGE, "share"),
        Claim("middleware", instead, asks, momentum, at_most(most), FRAMES, unit="share"),
    )


def errors(task: str, method: str, cards: int) -> float:
    """Of held-out errors, over one worker's."""
    return cell(TABLES, f"{task}.json", "error_over_serial", method=method, workers=cards)


def speed(task: str, method: str, cards: int) -> float:
    """At equal samples, exchanges at 10 Gbit/s included."""
    (found,) = cells(TABLES, f"{task}.json", method=method, workers=cards)
    return float(1 / found["seconds_over_serial"]["10"])


def tables() -> list[Claim]:
    """The article's other networks, in small: errors, and how fast."""
    instead = "the same, with block momentum in its place"
    more = (
        ("an LSTM that chats, ASGD, 4 cards: better than one", "chat_seeds", "asgd", 4, 0.0, CHAT),
        ("a BLSTM, averaging, 8 cards: 0.8 % more errors", "blstm_seeds", "averaging", 8, 0.008, BLSTM),
        (instead, "blstm_seeds", "cold", 8, 0.008, RATE),
        ("block momentum, its rate not raised with N", "blstm_seeds", "cold-rate=0", 8, 0.008, ""),
        ("AlexNet, averaging, 4 cards: 3.7 % more errors", "pictures_longer", "averaging", 4, 0.037, CNN),
        (instead, "pictures_longer", "cold", 4, 0.037, CNN),
    )
    times = (
        ("an LSTM that chats, 4 cards: 3.35 times as fast", "chat", "asgd", 4, 3.35, WAITS),
        ("a BLSTM, 8 cards: 6.83 times as fast", "blstm", "averaging", 8, 6.83, ""),
        ("AlexNet, 4 cards: 3.55 times as fast", "pictures", "averaging", 4, 3.55, ""),
    )
    asked = "errors over one worker's, at most those", "as fast at equal samples, 10 Gbit/s, computed"
    return [
        *(
            Claim("middleware", t, asked[0], partial(errors, *of), at_most(x), TABLES, w, "share")
            for t, *of, x, w in more
        ),
        *(Claim("middleware", t, asked[1], partial(speed, *of), at_least(x), TABLES, w, "x") for t, *of, x, w in times),
    ]


CLAIMS = (
    *dnn(8, "0.7 %", 0.0075),
    *dnn(16, "2 %", 0.02),
    *tables(),
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
        "middleware", "no sample is used twice", "lost or repeated samples, 98 kills", miscounted, at_most(0), COUNTING
    ),
)
