# SPDX-License-Identifier: Apache-2.0
"""The claims of block momentum, with SGD and with Adam."""

from __future__ import annotations

from functools import partial

from _article_claims import FRAMES, GROWTH, SPEECH, Claim, at_least, at_most, cell, cells, frames, read, speed_up

SMALL = ("small-sgd", "small-adam", "small-lines")
AVERAGED, ADAM = "others.json", "adam.json"
FRAMES_64 = (
    "512 blocks of 4 are too few: 1,024 of 2 +0.5 %, one worker first +1.9 %, grown +2.3 % (many.json, table.json)"
)
GROWN = (
    "in growth few workers train first: 64 from the first step are 56 times as fast, and 2 to 4 % worse (others.json)"
)
ADAM_64 = "512 blocks of 4 are too few: in 2,048 of 1 -0.4 % (adam_many.json)"
ROOT = "with a rate times the root of N and a ramp; in blocks of 1 bmuf_adam is 1.0 % better than that (adam_many.json)"
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


def loss(method: str, workers: int, file: str, task: str = "frames-sgd") -> float:
    """On frames of speech, over one worker's."""
    return frames(method, workers, "over_serial", file, task)


def dnn(
    cards: int, times: int, method: str, file: str, why: str = "", note: str = "", gbit: str = "1"
) -> tuple[Claim, Claim]:
    """A network on frames of speech: how fast, and how good."""
    asks = f"{times} times at equal samples, {gbit} Gbit/s"
    what = f"a DNN on frames, {cards} cards{note}"

    def speed() -> float:
        return 1 / cells(FRAMES, file, method=method, workers=cards)[0]["seconds_over_serial"][gbit]

    model = partial(loss, method, cards, file)
    return (
        Claim("bmuf", f"{what}: {times} times as fast", asks, speed, at_least(times), FRAMES, unit="x"),
        Claim(
            "bmuf",
            f"{what}: the model of one",
            "at most 1 % more loss, mean of three seeds",
            model,
            at_most(0.01),
            FRAMES,
            why,
            unit="share",
        ),
    )


def moments_behind(method: str, best: str) -> float:
    """By how much one way with Adam's moments has more loss than another, the least of 16 and 64 workers."""
    return min(loss(method, n, ADAM, "frames-adam") - loss(best, n, ADAM, "frames-adam") for n in (16, 64))


def sync_behind(workers: int) -> float:
    """By how much synchronous Adam on frames, with a ramp, has more loss than `bmuf_adam`."""
    rows = cells(FRAMES, ADAM, task="frames-adam", workers=workers)
    sync = min(row["over_serial"] for row in rows if row["method"].startswith("sync"))
    return float(sync - loss("cold", workers, ADAM, "frames-adam"))


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
    *dnn(16, 15, "cold", "seeds.json"),
    *dnn(64, 56, "cold", "seeds_many.json", FRAMES_64),
    *dnn(64, 56, "cold-period=1", "seeds_many.json", note=", an exchange each minibatch", gbit="10"),
    Claim(
        "bmuf",
        "a DNN on frames, 16 cards: averaging loses",
        "more loss than with block momentum, three seeds",
        lambda: loss("averaging", 16, "seeds.json") - loss("cold", 16, "seeds.json"),
        at_least(0.0),
        FRAMES,
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
    Claim(
        "bmuf_adam",
        "averaged moments lose",
        "more loss than compensated ones on frames, 16 and 64 workers",
        partial(moments_behind, "uncompensated-beta1=0.9", "cold-beta1=0.9"),
        at_least(0.0),
        FRAMES,
        unit="share",
    ),
    Claim(
        "bmuf_adam",
        "a smaller beta1 gains",
        "less loss at 0.5 than at 0.9 on frames, 16 and 64 workers",
        partial(moments_behind, "cold-beta1=0.9", "cold"),
        at_least(0.0),
        FRAMES,
        unit="share",
    ),
    Claim(
        "bmuf_adam",
        "frames, 16 machines: Adam's model kept",
        "at most 1 % more loss, mean of two seeds",
        partial(loss, "cold", 16, "adam_seeds.json", "frames-adam"),
        at_most(0.01),
        FRAMES,
        unit="share",
    ),
    Claim(
        "bmuf_adam",
        "frames, 64 machines: Adam's model kept",
        "at most 1 % more loss",
        partial(loss, "cold", 64, ADAM, "frames-adam"),
        at_most(0.01),
        FRAMES,
        ADAM_64,
        unit="share",
    ),
    Claim(
        "bmuf_adam",
        "frames, 64 machines: synchronous Adam falls behind",
        "more loss than bmuf_adam in blocks of 4",
        partial(sync_behind, 64),
        at_least(0.0),
        FRAMES,
        ROOT,
        unit="share",
    ),
)
