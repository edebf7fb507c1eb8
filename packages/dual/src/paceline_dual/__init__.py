# SPDX-License-Identifier: Apache-2.0
"""Dual learning: two opposite tasks teach each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.core.lazy import lazily

if TYPE_CHECKING:
    from paceline_dual.batches import Data
    from paceline_dual.choose import Candidates, Choice, Ranking, exact_match, joined
    from paceline_dual.classifier import Classifier, LabelPrior, LabelToText
    from paceline_dual.hugging_face import HuggingFaceLanguageModel, HuggingFaceSeq2Seq
    from paceline_dual.inference import DualInference
    from paceline_dual.learning import Reward, Unlabelled, unlabelled_loss
    from paceline_dual.pair import DIRECTIONS, Direction, Pair
    from paceline_dual.priors import PriorCourse, train_prior
    from paceline_dual.protocols import Conditional, Prior, flat, repeat, undisturbed
    from paceline_dual.sequences import PADDING, lengths, mask, pad, same_width, unpad
    from paceline_dual.settings import METHODS, Constraint, Course, Looks, Loop, Mix, Rates
    from paceline_dual.show import Show, shown
    from paceline_dual.supervised import ByLength, Duality, Opposites, Supervised, gap, supervised_loss
    from paceline_dual.training import train
    from paceline_dual.transformer import LanguageModel, Seq2Seq
    from paceline_dual.virtual import Step, VirtualPair
    from paceline_dual.words import Words
else:
    __getattr__, __dir__ = lazily(
        __name__,
        {
            "ByLength": "supervised",
            "Candidates": "choose",
            "Choice": "choose",
            "Classifier": "classifier",
            "Conditional": "protocols",
            "Constraint": "settings",
            "Course": "settings",
            "DIRECTIONS": "pair",
            "Data": "batches",
            "Direction": "pair",
            "DualInference": "inference",
            "Duality": "supervised",
            "HuggingFaceLanguageModel": "hugging_face",
            "HuggingFaceSeq2Seq": "hugging_face",
            "LabelPrior": "classifier",
            "LabelToText": "classifier",
            "LanguageModel": "transformer",
            "Looks": "settings",
            "Loop": "settings",
            "METHODS": "settings",
            "Mix": "settings",
            "Opposites": "supervised",
            "PADDING": "sequences",
            "Pair": "pair",
            "Prior": "protocols",
            "PriorCourse": "priors",
            "Ranking": "choose",
            "Rates": "settings",
            "Reward": "learning",
            "Seq2Seq": "transformer",
            "Show": "show",
            "Step": "virtual",
            "Supervised": "supervised",
            "Unlabelled": "learning",
            "VirtualPair": "virtual",
            "Words": "words",
            "exact_match": "choose",
            "flat": "protocols",
            "gap": "supervised",
            "joined": "choose",
            "lengths": "sequences",
            "mask": "sequences",
            "pad": "sequences",
            "repeat": "protocols",
            "same_width": "sequences",
            "shown": "show",
            "supervised_loss": "supervised",
            "train": "training",
            "train_prior": "priors",
            "undisturbed": "protocols",
            "unlabelled_loss": "learning",
            "unpad": "sequences",
        },
    )

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
    "Loop",
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
