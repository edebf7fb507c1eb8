# SPDX-License-Identifier: Apache-2.0
"""LightRNN: a vocabulary of millions of words in a model of megabytes."""

from __future__ import annotations

from paceline.lightrnn.baseline import WordRNN
from paceline.lightrnn.generate import beam, sample
from paceline.lightrnn.language import LanguageModel
from paceline.lightrnn.model import LightRNN
from paceline.lightrnn.parts import TwoComponentEmbedding, TwoComponentSoftmax
from paceline.lightrnn.ranking import Ranking, top_words
from paceline.lightrnn.sizes import Sizes, parameter_bytes, sizes_of
from paceline.lightrnn.state import PADDING, State
from paceline.lightrnn.table import WordTable

__all__ = [
    "PADDING",
    "LanguageModel",
    "LightRNN",
    "Ranking",
    "Sizes",
    "State",
    "TwoComponentEmbedding",
    "TwoComponentSoftmax",
    "WordRNN",
    "WordTable",
    "beam",
    "parameter_bytes",
    "sample",
    "sizes_of",
    "top_words",
]
