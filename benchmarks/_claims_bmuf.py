# SPDX-License-Identifier: Apache-2.0
"""The claims of block momentum, with SGD and with Adam."""

from __future__ import annotations

from functools import partial

from _article_claims import (
    FRAMES,
    GROWTH,
    SPEECH,
    Claim,
    at_least,
    at_most,
    cell,
    cells,
    frames,
    read,
    speed_up,
)

SMALL = ("small-sgd", "small-adam", "small-lines")
AVERAGED = "others.json"
FRAMES_64 = "64 workers have 512 blocks each; grown 2.3 %, DiLoCo's constants 4.9 %, averaging 20 % (table.json)"
GROWN = (
    "in growth few workers train first: 64 from the first step are 56 times as fast, and 2 to 4 % worse (others.json)"
)
LEVEL = "synchronous Adam with a growing batch and a tuned rate is as good; at one worker's rate x N it is 14 % worse"


def worst_over_serial(workers: int) -> float:
    return float(read(GROWTH, "plateau.json")["worst_over_serial"][str(workers)])


def slowest(workers: int) -> float:
    return min(speed_up(task, workers) for task in SMALL)


def behind_averaging(workers: int) -> float:
    """The least by which averaging is worse than block momentum, of four tasks."""
    rows = {
        (c["task"], c["method"]): c["over_serial"] for c in read(SPEECH, AVERAGED)["cells"] if c["workers"] == workers
    }
    return float(min(rows[task, "averaging"] - rows[task, "grown"] for task in (*SMALL, "small-speech")))


def sync_adam_behind() -> float:
    """By how much synchronous Adam with 64 workers, at the best of its rates, is worse than `bmuf_adam`."""
    rows = [c for c in read(GROWTH, "plateau.json")["cells"] if c["task"] == "small-adam" and c["workers"] == 64]
    best = min(c["over_serial"] for c in rows if c["method"].startswith("sync") and c["over_serial"] is not None)
    return float(best - next(c["over_serial"] for c in rows if c["method"] == "grown"))


CLAIMS = (
    Claim(
        "bmuf",
        "16 cards: 15 times as fast",
        "15 times, 10 Gbit/s, worst of 3 tasks",
        partial(slowest, 16),
        at_least(15),
        GROWTH,
        unit="x",
    ),
    Claim(
        "bmuf",
        "16 cards: the model of one",
        "at most 1 % worse, worst of 3 tasks",
        partial(worst_over_serial, 16),
        at_most(0.01),
        GROWTH,
        unit="share",
    ),
    Claim(
        "bmuf",
        "64 cards: 56 times as fast",
        "56 times, 10 Gbit/s, worst of 3 tasks",
        partial(slowest, 64),
        at_least(56),
        GROWTH,
        GROWN,
        "x",
    ),
    Claim(
        "bmuf",
        "64 cards: the model of one",
        "at most 1 % worse, worst of 3 tasks",
        partial(worst_over_serial, 64),
        at_most(0.01),
        GROWTH,
        unit="share",
    ),
    Claim(
        "bmuf",
        "a DNN on frames, 16 cards: 15 times as fast",
        "15 times at equal samples, 1 Gbit/s",
        lambda: 1 / cells(FRAMES, "table.json", method="cold", workers=16)[0]["seconds_over_serial"]["1"],
        at_least(15),
        FRAMES,
        unit="x",
    ),
    Claim(
        "bmuf",
        "a DNN on frames, 16 cards: the model of one",
        "at most 1 % more loss",
        partial(frames, "cold", 16, "over_serial"),
        at_most(0.01),
        FRAMES,
        unit="share",
    ),
    Claim(
        "bmuf",
        "a DNN on frames, 64 cards: 56 times as fast",
        "56 times at equal samples, 1 Gbit/s",
        lambda: 1 / cells(FRAMES, "table.json", method="cold", workers=64)[0]["seconds_over_serial"]["1"],
        at_least(56),
        FRAMES,
        unit="x",
    ),
    Claim(
        "bmuf",
        "a DNN on frames, 64 cards: the model of one",
        "at most 1 % more loss",
        partial(frames, "cold", 64, "over_serial"),
        at_most(0.01),
        FRAMES,
        FRAMES_64,
        unit="share",
    ),
    Claim(
        "bmuf",
        "averaging loses with many cards",
        "worse than block momentum at 32, least of 4 tasks",
        partial(behind_averaging, 32),
        at_least(0.0),
        SPEECH,
        unit="share",
    ),
    Claim(
        "bmuf_adam",
        "64 machines: Adam's model kept",
        "at most 1 % worse",
        lambda: cell(GROWTH, "plateau.json", "over_serial", task="small-adam", method="grown", workers=64),
        at_most(0.01),
        GROWTH,
        unit="share",
    ),
    Claim(
        "bmuf_adam",
        "32 machines on speech: model kept",
        "at most 1 % more errors",
        lambda: cell(SPEECH, "speech_seeds.json", "error_over_serial", method="grown", workers=32),
        at_most(0.01),
        SPEECH,
        unit="share",
    ),
    Claim(
        "bmuf_adam",
        "synchronous Adam falls behind",
        "worse than bmuf_adam at 64, best of its rates",
        sync_adam_behind,
        at_least(0.0),
        GROWTH,
        LEVEL,
        unit="share",
    ),
)
