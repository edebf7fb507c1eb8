# SPDX-License-Identifier: Apache-2.0
"""LightRNN: a vocabulary of millions of words in a model of megabytes."""

from __future__ import annotations

from paceline_lightrnn.allocation import Allocation, reallocate
from paceline_lightrnn.baseline import WordRNN
from paceline_lightrnn.building import build, load_model, parameter_bytes
from paceline_lightrnn.corpus import Corpus, Passages
from paceline_lightrnn.costs import CostSource, DenseCosts, FactoredCosts
from paceline_lightrnn.generate import beam, sample
from paceline_lightrnn.language import LanguageModel
from paceline_lightrnn.model import LightRNN
from paceline_lightrnn.parts import TwoComponentEmbedding, TwoComponentSoftmax
from paceline_lightrnn.preparing import Data, prepare
from paceline_lightrnn.ranking import Ranking, top_words
from paceline_lightrnn.scoring import Score, perplexity, score
from paceline_lightrnn.settings import Course, Settings, Shape, Source
from paceline_lightrnn.sizes import Sizes, sizes_of
from paceline_lightrnn.state import PADDING, State
from paceline_lightrnn.table import WordTable
from paceline_lightrnn.text import Text
from paceline_lightrnn.training import train
from paceline_lightrnn.vocabulary import Vocabulary

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
