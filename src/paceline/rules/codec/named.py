# SPDX-License-Identifier: Apache-2.0
"""Codecs by name, and parsed from text."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial

from paceline.core.parse import like, read_call
from paceline.errors import RuleError
from paceline.rules.codec.base import Codec
from paceline.rules.codec.dense import Dense
from paceline.rules.codec.e3m0 import E3M0
from paceline.rules.codec.half import Half
from paceline.rules.codec.int8 import Int8
from paceline.rules.codec.low_rank import LowRank
from paceline.rules.codec.one_bit import OneBit
from paceline.rules.codec.sign import Sign
from paceline.rules.codec.top_k import TopK

CODECS: dict[str, Callable[..., Codec]] = {
    "dense": Dense,
    "bf16": partial(Half, "bf16"),
    "fp16": partial(Half, "fp16"),
    "int8": Int8,
    "e3m0": E3M0,
    "one_bit": OneBit,
    "sign": Sign,
    "low_rank": LowRank,
    "top_k": TopK,
}
"""Name -> factory."""


def codec_from_text(text: str) -> Codec:
    """Read `one_bit`, `one_bit()` or `low_rank(rank=2, feedback=False)`; nothing in it is ever evaluated."""
    name, settings = read_call(text, "codec", "one_bit or low_rank(rank=2)")
    if name not in CODECS:
        raise RuleError(f"there is no codec {name!r}; there are {', '.join(CODECS)}{like(name, list(CODECS))}")
    known = list(inspect.signature(CODECS[name]).parameters)
    for setting in settings:
        if setting not in known:
            has = f"it has {', '.join(known)}" if known else "it has none"
            raise RuleError(f"{name} has no setting {setting!r}; {has}{like(setting, known)}")
    return CODECS[name](**settings)


def codec_name(codec: Codec) -> str:
    """The name of a codec with the settings that it has by default.

    Raises:
        KeyError: it has others.
    """
    return {make(): name for name, make in CODECS.items()}[codec]
