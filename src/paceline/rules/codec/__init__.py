# SPDX-License-Identifier: Apache-2.0
"""The third choice of a rule: how is it written on the wire?"""

from __future__ import annotations

from paceline.rules.codec.base import Codec, State, Steps, Wire
from paceline.rules.codec.dense import Dense
from paceline.rules.codec.e3m0 import E3M0
from paceline.rules.codec.half import Half
from paceline.rules.codec.int8 import Int8
from paceline.rules.codec.layout import Layout, Matrix
from paceline.rules.codec.low_rank import LowRank
from paceline.rules.codec.named import CODECS, codec_from_text, codec_name
from paceline.rules.codec.one_bit import OneBit
from paceline.rules.codec.sign import Sign
from paceline.rules.codec.top_k import TopK
from paceline.rules.codec.two_sided import TwoSided
from paceline.rules.codec.warm import Warmed

__all__ = [
    "CODECS",
    "E3M0",
    "Codec",
    "Dense",
    "Half",
    "Int8",
    "Layout",
    "LowRank",
    "Matrix",
    "OneBit",
    "Sign",
    "State",
    "Steps",
    "TopK",
    "TwoSided",
    "Warmed",
    "Wire",
    "codec_from_text",
    "codec_name",
]
