# SPDX-License-Identifier: Apache-2.0
"""The claims of dual learning."""

from __future__ import annotations

from _article_claims import (
    DUAL,
    Claim,
    at_least,
    dual,
)

TWINS = (
    "of words that were labelled less than 5 times 15 to 19 % are wrong, of those with 20 and more 1 to 3 %: two words "
)
TWINS += "that both models exchange come back as they went (errors.txt)"
CONVERGED = "with all labels both are at 99 %, with a tenth both end alike, at weights 0.01 and 0.1"


CLAIMS = (
    Claim(
        "learning",
        "dual learning: 10 % of the labels beat all",
        "exact sentences over those of all labels",
        lambda: dual("dual", "beam") / dual("full", "beam"),
        at_least(1.0),
        DUAL,
        TWINS,
    ),
    Claim(
        "learning",
        "dual inference gains",
        "above plain beam search, all labels",
        lambda: dual("full", "dual_inference") - dual("full", "beam"),
        at_least(0.0),
        DUAL,
    ),
    Claim(
        "learning",
        "the constraint gains 2 BLEU",
        "2 BLEU more, all labels",
        lambda: dual("dual_supervised", "beam", "bleu") - dual("full", "beam", "bleu"),
        at_least(2.0),
        DUAL,
        CONVERGED,
        "BLEU",
    ),
    Claim(
        "learning",
        "the constraint: more words of sentiment",
        "share of such words with it over without",
        lambda: None,
        at_least(1.0),
        DUAL,
        "generation from a label was not measured",
    ),
)
