# SPDX-License-Identifier: Apache-2.0
"""Dual learning: two opposite tasks teach each other."""

from __future__ import annotations

from paceline.dual.batches import Data
from paceline.dual.choose import Candidates, Choice, Ranking, exact_match, joined
from paceline.dual.classifier import Classifier, LabelPrior, LabelToText
from paceline.dual.hugging_face import HuggingFaceLanguageModel, HuggingFaceSeq2Seq
from paceline.dual.inference import DualInference
from paceline.dual.learning import Reward, Unlabelled, unlabelled_loss
from paceline.dual.pair import DIRECTIONS, Direction, Pair
from paceline.dual.priors import PriorCourse, train_prior
from paceline.dual.protocols import Conditional, Prior, flat, repeat, undisturbed
from paceline.dual.sequences import PADDING, lengths, mask, pad, same_width, unpad
from paceline.dual.settings import METHODS, Constraint, Course, Looks, Mix, Rates
from paceline.dual.show import Show, shown
from paceline.dual.supervised import ByLength, Duality, Opposites, Supervised, gap, supervised_loss
from paceline.dual.training import train
from paceline.dual.transformer import LanguageModel, Seq2Seq
from paceline.dual.virtual import Step, VirtualPair
from paceline.dual.words import Words

__all__ = [
    "DIRECTIONS",
    "METHODS",
    "PADDING",
    "ByLength",
    "Candidates",
    "Choice",
    "Classifier",
    "Conditional",
    "Constraint",
    "Course",
    "Data",
    "Direction",
    "DualInference",
    "Duality",
    "HuggingFaceLanguageModel",
    "HuggingFaceSeq2Seq",
    "LabelPrior",
    "LabelToText",
    "LanguageModel",
    "Looks",
    "Mix",
    "Opposites",
    "Pair",
    "Prior",
    "PriorCourse",
    "Ranking",
    "Rates",
    "Reward",
    "Seq2Seq",
    "Show",
    "Step",
    "Supervised",
    "Unlabelled",
    "VirtualPair",
    "Words",
    "exact_match",
    "flat",
    "gap",
    "joined",
    "lengths",
    "mask",
    "pad",
    "repeat",
    "same_width",
    "shown",
    "supervised_loss",
    "train",
    "train_prior",
    "undisturbed",
    "unlabelled_loss",
    "unpad",
]
