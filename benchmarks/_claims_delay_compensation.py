# SPDX-License-Identifier: Apache-2.0
"""The claims of training without waiting: DC-ASGD."""

from __future__ import annotations

from _article_claims import (
    SERVER,
    STALE,
    Claim,
    at_least,
    gap_closed,
    in_text,
)

STEPS = "on text 59 to 87 % of what asgd loses is won back, on digits 9 to 34 %"


CLAIMS = (
    Claim(
        "learning",
        "DC-ASGD: nearly the serial model",
        "90 % of what asgd loses, text, 8 workers",
        lambda: gap_closed("text", "dc_asgd adaptive", 8),
        at_least(0.9),
        STALE,
        STEPS,
    ),
    Claim(
        "learning",
        "DC-ASGD is better than ASGD",
        "gap closed above 0, digits, 8 workers",
        lambda: gap_closed("digits", "dc_asgd adaptive", 8),
        at_least(0.0),
        STALE,
    ),
    Claim(
        "learning",
        "asynchronous: no waiting for slow ones",
        "95 % of the summed speed, one 5 times slower",
        lambda: in_text(SERVER, r"\| `asgd` \|[^\n]*\*\*([0-9.]+)\*\*"),
        at_least(0.95),
        SERVER,
    ),
)
