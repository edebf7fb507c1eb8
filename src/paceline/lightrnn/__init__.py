# SPDX-License-Identifier: Apache-2.0
"""LightRNN: a vocabulary of millions of words in a model of megabytes."""

from __future__ import annotations

from paceline.lightrnn.allocation import Allocation, reallocate
from paceline.lightrnn.costs import CostSource, DenseCosts, FactoredCosts
from paceline.lightrnn.model import LightRNN
from paceline.lightrnn.ranking import Ranking, top_words
from paceline.lightrnn.state import PADDING, State
from paceline.lightrnn.table import WordTable

__all__ = [
    "PADDING",
    "Allocation",
    "CostSource",
    "DenseCosts",
    "FactoredCosts",
    "LightRNN",
    "Ranking",
    "State",
    "WordTable",
    "reallocate",
    "top_words",
]
