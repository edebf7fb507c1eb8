# SPDX-License-Identifier: Apache-2.0
"""Floor 2, the third choice of a rule: how is it written on the wire?"""

from __future__ import annotations

from paceline.codec.base import Codec, State, Steps, Wire
from paceline.codec.dense import Dense
from paceline.codec.e3m0 import E3M0
from paceline.codec.half import Half
from paceline.codec.int8 import Int8
from paceline.codec.layout import Layout, Matrix
from paceline.codec.low_rank import LowRank
from paceline.codec.named import CODECS, codec_from_text
from paceline.codec.one_bit import OneBit
from paceline.codec.sign import Sign
from paceline.codec.top_k import TopK
from paceline.codec.two_sided import TwoSided
from paceline.codec.warm import Warmed

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
]
