# SPDX-License-Identifier: Apache-2.0
"""LightRNN: a vocabulary of millions of words in a model of megabytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline_lightrnn.allocation import Allocation, reallocate
    from paceline_lightrnn.baseline import WordRNN
    from paceline_lightrnn.building import build, load_model, parameter_bytes
    from paceline_lightrnn.corpus import Corpus, Passages
    from paceline_lightrnn.costs import CostSource, DenseCosts, FactoredCosts
    from paceline_lightrnn.exporting import NextWords
    from paceline_lightrnn.generate import beam, sample
    from paceline_lightrnn.language import LanguageModel
    from paceline_lightrnn.learning import TableLearner
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
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "Allocation": "allocation",
            "Corpus": "corpus",
            "CostSource": "costs",
            "Course": "settings",
            "Data": "preparing",
            "DenseCosts": "costs",
            "FactoredCosts": "costs",
            "LanguageModel": "language",
            "LightRNN": "model",
            "NextWords": "exporting",
            "PADDING": "state",
            "Passages": "corpus",
            "Ranking": "ranking",
            "Score": "scoring",
            "Settings": "settings",
            "Shape": "settings",
            "Sizes": "sizes",
            "Source": "settings",
            "State": "state",
            "TableLearner": "learning",
            "Text": "text",
            "TwoComponentEmbedding": "parts",
            "TwoComponentSoftmax": "parts",
            "Vocabulary": "vocabulary",
            "WordRNN": "baseline",
            "WordTable": "table",
            "beam": "generate",
            "build": "building",
            "load_model": "building",
            "parameter_bytes": "building",
            "perplexity": "scoring",
            "prepare": "preparing",
            "reallocate": "allocation",
            "sample": "generate",
            "score": "scoring",
            "sizes_of": "sizes",
            "top_words": "ranking",
            "train": "training",
        },
    )

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
    "NextWords",
    "Passages",
    "Ranking",
    "Score",
    "Settings",
    "Shape",
    "Sizes",
    "Source",
    "State",
    "TableLearner",
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
