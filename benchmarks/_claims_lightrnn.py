# SPDX-License-Identifier: Apache-2.0
"""The claims of LightRNN."""

from __future__ import annotations

from _article_claims import (
    LIGHT,
    Claim,
    at_least,
    at_most,
    in_text,
    perplexity,
)

COMMON = (
    "two vectors that hundreds of words share learn less from each occurrence: at 6 passes 1.16, at d = 512 still 1.34"
)


CLAIMS = (
    Claim(
        "learning",
        "a 10 M word model in 50 MB, not 80 GB",
        "at most 50 MB",
        lambda: in_text(LIGHT, r"tied: ([0-9.]+) MB"),
        at_most(50),
        LIGHT,
        "vectors of 1000 numbers in fp32; half of that in bf16 was not trained",
        "MB",
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
)
