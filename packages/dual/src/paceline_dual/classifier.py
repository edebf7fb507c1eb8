# SPDX-License-Identifier: Apache-2.0
"""Labels on one side: a classifier P(label | x), a prior over labels, and text for a label, P(text | label)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import MismatchError, UnsupportedError
from paceline_dual import search, storage
from paceline_dual.layers import check_sizes, embedding
from paceline_dual.protocols import undisturbed
from paceline_dual.sequences import check, check_count, check_pairs
from paceline_dual.writer import Writer


class Classifier(nn.Module):
    """P(y | x) = softmax(module(x))[y] for labels y, int64 [B], and any x.

    Args:
        module: takes x, a tensor whose first axis counts the examples, to logits [B, classes]. Sequences come padded
            with -1, which the module has to handle.
        classes: number of labels.

    Raises:
        UnsupportedError: there is no class.
    """

    def __init__(self, module: nn.Module, classes: int) -> None:
        super().__init__()
        _check_classes(classes)
        self.module, self.classes = module, classes

    def distribution(self, x: Tensor) -> Tensor:
        """log P of every label, [B, classes].

        Raises:
            MismatchError: the module does not give as many logits.
        """
        logits = self.module(x)
        if logits.shape != (len(x), self.classes):
            raise MismatchError(
                f"the module gives {list(logits.shape)} for {len(x)} examples; a classifier of {self.classes} classes "
                f"wants logits [{len(x)}, {self.classes}]"
            )
        return F.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x), [B], of labels y [B]; MismatchError if they are no labels or not as many as the x."""
        check_pairs(y, x)
        _check_labels(y, self.classes)
        return self.distribution(x).gather(1, y[:, None])[:, 0]

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """k independent draws from P(. | x) for each x, labels [B, k]."""
        check_count(k)
        with undisturbed(self):
            return torch.multinomial(self.distribution(x).exp(), k, replacement=True, generator=generator)

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k most probable labels [B, k] and their log P [B, k], exact; k is at most the number of classes."""
        check_count(k, self.classes)
        with undisturbed(self):
            log_probs, labels = self.distribution(x).topk(k, 1)
            return labels, log_probs


class LabelPrior(nn.Module):
    """P(label) = counts[label] / sum of counts.

    Args:
        counts: a positive number for each label; or the number of labels, which then are equally probable.

    Raises:
        UnsupportedError: there is no label, or a label without a count, whose log P would be -inf. Add 1 to each count,
            or leave the label out.
    """

    log_probs: Tensor

    def __init__(self, counts: int | Sequence[float] | Tensor) -> None:
        super().__init__()
        if isinstance(counts, int):
            _check_classes(counts)
            numbers = torch.ones(counts, dtype=torch.float64)
        else:
            numbers = torch.as_tensor(counts, dtype=torch.float64).detach().cpu()
        if numbers.dim() != 1 or not numbers.numel() or not bool((numbers.isfinite() & (numbers > 0)).all()):
            raise UnsupportedError(
                f"the counts of labels are a positive number for each; got {numbers.tolist()}: add 1 to each, or leave "
                "a label out that never comes"
            )
        self.classes = numbers.numel()
        self.register_buffer("log_probs", (numbers / numbers.sum()).log().float())

    def log_prob(self, x: Tensor) -> Tensor:
        """log P [B] of labels [B]; MismatchError if they are no labels."""
        _check_labels(x, self.classes)
        return self.log_probs[x]


class LabelToText(storage.Saved):
    """P(text | label): a language model every position of which knows the label.

    Args:
        words: number of symbols of the text; begin and end are added inside.
        classes: number of labels.
        dimension: as the rest, see `transformer.Seq2Seq`.

    Raises:
        UnsupportedError: a number makes no sense.
    """

    FORMAT = "paceline dual label to text 1"

    def __init__(
        self,
        words: int,
        classes: int,
        dimension: int = 128,
        layers: int = 2,
        heads: int = 4,
        dropout: float = 0.1,
        longest: int = 64,
    ) -> None:
        super().__init__()
        _check_classes(classes)
        check_sizes(dimension, layers, heads, dropout, words=words, longest=longest)
        self.about = {
            "words": words,
            "classes": classes,
            "dimension": dimension,
            "layers": layers,
            "heads": heads,
        }
        self.about |= {"dropout": dropout, "longest": longest}
        self.longest, self.classes = longest, classes
        self.labels = embedding(classes, dimension)
        self.writer = Writer(words, dimension, layers, heads, dropout, longest, cross=False)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x) [B] of sequences y [B, T] for labels x [B], the end of y included.

        Raises:
            MismatchError: there are not as many y as x, x are no labels, or y no sequences of this model's symbols.
        """
        check_pairs(y, x)
        return self.writer.log_prob(check(y, self.writer.words, self.longest, "texts y"), also=self._vector(x))

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """k independent texts for each label of x [B], [B, k, T]; see `Conditional.sample`."""
        check_count(k)
        with undisturbed(self):
            steps = self.writer.steps(len(x), k, also=self._vector(x))
            return search.sample(steps, len(x), k, x.device, generator)

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best texts of a beam of k for each label of x [B], and their log P; see `search.beam`."""
        check_count(k)
        with undisturbed(self):
            return search.beam(self.writer.steps(len(x), k, also=self._vector(x)), len(x), k, x.device)

    def _vector(self, x: Tensor) -> Tensor:
        _check_labels(x, self.classes)
        vectors: Tensor = self.labels(x) * self.labels.embedding_dim**0.5
        return vectors


def _check_classes(classes: int) -> None:
    if classes < 1:
        raise UnsupportedError(f"there are {classes} classes; it takes 1 at least")


def _check_labels(labels: Tensor, classes: int) -> None:
    if labels.dtype != torch.int64 or labels.dim() != 1:
        raise MismatchError(f"labels are int64 [B]; got {labels.dtype} {list(labels.shape)}")
    if labels.numel():
        low, high = (int(bound) for bound in labels.aminmax())
        if low < 0 or high >= classes:
            raise MismatchError(f"a label is from 0 to {classes - 1}; got {low if low < 0 else high}")
