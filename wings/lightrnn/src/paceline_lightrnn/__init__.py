# SPDX-License-Identifier: Apache-2.0
"""LightRNN: a vocabulary of millions of words in a model of megabytes."""

from __future__ import annotations

from paceline.lightrnn.allocation import Allocation, reallocate
from paceline.lightrnn.baseline import WordRNN
from paceline.lightrnn.building import build, load_model
from paceline.lightrnn.corpus import Corpus, Passages
from paceline.lightrnn.costs import CostSource, DenseCosts, FactoredCosts
from paceline.lightrnn.generate import beam, sample
from paceline.lightrnn.language import LanguageModel
from paceline.lightrnn.model import LightRNN
from paceline.lightrnn.parts import TwoComponentEmbedding, TwoComponentSoftmax
from paceline.lightrnn.preparing import Data, prepare
from paceline.lightrnn.ranking import Ranking, top_words
from paceline.lightrnn.scoring import Score, perplexity, score
from paceline.lightrnn.settings import Course, Settings, Shape, Source
from paceline.lightrnn.sizes import Sizes, parameter_bytes, sizes_of
from paceline.lightrnn.state import PADDING, State
from paceline.lightrnn.table import WordTable
from paceline.lightrnn.text import Text
from paceline.lightrnn.training import train
from paceline.lightrnn.vocabulary import Vocabulary

__all__ = [
    "PADDING",
    "Allocation",
    "Corpus",
    "CostSource",
    "Course",
    "Data",
    "DenseCosts",
    "FactoredCosts",
    "LanguageModel",
    "LightRNN",
    "Passages",
    "Ranking",
    "Score",
    "Settings",
    "Shape",
    "Sizes",
    "Source",
    "State",
    "Text",
    "TwoComponentEmbedding",
    "TwoComponentSoftmax",
    "Vocabulary",
    "WordRNN",
    "WordTable",
    "beam",
    "build",
    "load_model",
    "parameter_bytes",
    "perplexity",
    "prepare",
    "reallocate",
    "sample",
    "score",
    "sizes_of",
    "top_words",
    "train",
]
