# SPDX-License-Identifier: Apache-2.0
"""The claims of LightRNN."""

from __future__ import annotations

from typing import Any

from _article_claims import LIGHT, Claim, at_least, at_most, in_text, perplexity, read

EQUAL = "2026-11-26_lightrnn_equal"

COMMON = (
    "two vectors that hundreds of words share learn less from each occurrence: at 6 passes 1.16, at d = 512 still 1.34"
)


def equal(key: str) -> dict[str, Any]:
    """A table of the record at equal memory and equal time, on 185,000 words."""
    return dict(read(EQUAL, "equal.json")[key])


def kept_in_half() -> float:
    """The largest share by which bf16 numbers raise a trained model's perplexity."""
    return float(max(read(EQUAL, "half.json")["bf16_over_fp32"].values()) - 1)


CLAIMS = (
    Claim(
        "learning",
        "a 10 M word model in 50 MB, not 80 GB",
        "at most 50 MB in bf16, which changes trained models by at most 0.01 %",
        lambda: in_text(LIGHT, r"tied: ([0-9.]+) MB") / 2 if kept_in_half() < 1e-4 else None,
        at_most(50),
        EQUAL,
        unit="MB",
    ),
    Claim(
        "learning",
        "LightRNN: better perplexity",
        "at most that of the full softmax at the same d",
        lambda: perplexity("lightrnn") / perplexity("full"),
        at_most(1.0),
        LIGHT,
        COMMON,
    ),
    Claim(
        "learning",
        "LightRNN trains faster",
        "twice the words a second",
        lambda: in_text(LIGHT, r"Words per second: ([0-9.]+) times"),
        at_least(2),
        LIGHT,
        unit="x",
    ),
    Claim(
        "learning",
        "LightRNN: better perplexity in equal memory",
        "at most the best softmax's of as many bytes, worst of d = 256 and 512",
        lambda: max(ratio for ratio in equal("equal_memory").values() if ratio is not None),
        at_most(1.0),
        EQUAL,
        unit="x",
    ),
    Claim(
        "learning",
        "the same with d = 1024",
        "at most the adaptive softmax's of as many bytes, after the same minute",
        lambda: read(EQUAL, "wide.json")["equal_memory"]["1024"],
        at_most(1.0),
        EQUAL,
        "in the minute it reads 91 thousand words, the adaptive softmax 507 thousand: the layer of 1024 takes the time",
        "x",
    ),
    Claim(
        "learning",
        "LightRNN: better perplexity in equal time",
        "at most the best softmax's after a minute of one core, best of d = 128, 256, 512",
        lambda: min(equal("equal_time").values()),
        at_most(1.0),
        EQUAL,
        unit="x",
    ),
    Claim(
        "learning",
        "LightRNN: efficient inference",
        "ten best of 185,000 words in half of the full softmax's time",
        lambda: equal("export")["ms"]["full"] / equal("export")["ms"]["light"],
        at_least(2),
        EQUAL,
        unit="x",
    ),
)
