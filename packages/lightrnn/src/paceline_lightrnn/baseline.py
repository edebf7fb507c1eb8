# SPDX-License-Identifier: Apache-2.0
"""The ordinary model to compare LightRNN with: a vector for each word at the input and at the output.

The output is a softmax over the whole vocabulary, or `nn.AdaptiveLogSoftmaxWithLoss` (Grave et al., ICML 2017), which
is cheaper where few words make up most of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import MismatchError, UnsupportedError
from paceline_lightrnn import storage
from paceline_lightrnn.language import LanguageModel
from paceline_lightrnn.sizes import available_bytes, light_sizes, sizes_of
from paceline_lightrnn.state import PADDING, State, check_words, make_recurrent, run, wide

FORMAT = "paceline word rnn 1"
SPREAD = 0.1
CUTOFFS = (2_000, 10_000, 50_000)
NARROWER = 4  # each part of an adaptive output has vectors this many times shorter than the part before
OUTPUTS = ("full", "adaptive")
Output = str | tuple[int, ...]
"""A name, or the cutoffs of an adaptive output."""


class WordRNN(LanguageModel):
    """A recurrent language model with one vector per word and LightRNN's interface and initialisation.

    The network has not read the state's last word yet.

    Args:
        words: V.
        dimension: d, of the vectors and of the hidden state.
        output: "full", a softmax over all words; "adaptive", which needs words in descending order of frequency (word 0
            is the most frequent); or where an adaptive output cuts the vocabulary: ascending, below V. Without them it
            takes those of `CUTOFFS` that make sense.
        layers: of the recurrent network.
        cell: "lstm", "gru" or "rnn".
        dropout: share of the input vectors', of the outputs' and, between layers, of the states' numbers set to zero
            in training.
        tied: input and output vectors are the same tensor; "full" only.

    Raises:
        UnsupportedError: there is no such output or cell, a number makes no sense, or the parameters do not fit into
            memory, which is checked before any is allocated.
    """

    def __init__(
        self,
        words: int,
        dimension: int,
        *,
        output: Output = "full",
        layers: int = 1,
        cell: str = "lstm",
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        if isinstance(output, str) and output not in OUTPUTS:
            raise UnsupportedError(f"there is no output {output!r}; there are {', '.join(OUTPUTS)}")
        if output != "full" and tied:
            raise UnsupportedError("an adaptive output has no vector of d numbers per word to share; leave `tied` away")
        if words < 1:
            raise UnsupportedError(f"a model has 1 word at least, got {words}")
        device = torch.empty(0).device  # where torch would make the parameters
        if device.type != "meta":
            _check_memory(words, dimension, device, output, layers=layers, cell=cell, tied=tied)
        self.words, self.dimension, self.layers, self.cell, self.tied = words, dimension, layers, cell, tied
        self.recurrent = make_recurrent(cell, dimension, layers, dropout)
        self.dropout = nn.Dropout(dropout)
        self.word_in = nn.Parameter(torch.empty(words, dimension).uniform_(-SPREAD, SPREAD))
        self.adaptive: nn.AdaptiveLogSoftmaxWithLoss | None = None
        if output != "full":
            cutoffs = default_cutoffs(words, dimension) if isinstance(output, str) else output
            self.adaptive = _adaptive(words, dimension, cutoffs)
        else:
            self.word_out = (
                self.word_in if tied else nn.Parameter(torch.empty(words, dimension).uniform_(-SPREAD, SPREAD))
            )
            self.word_bias = nn.Parameter(torch.zeros(words))

    def extra_repr(self) -> str:
        return f"{self.words} words, {self.dimension}, tied={self.tied}"

    def begin(self, batch: int, word: int = 0) -> State:
        """See `LanguageModel.begin`."""
        if batch < 1 or not 0 <= word < self.words:
            raise MismatchError(
                f"begin takes 1 sequence at least and a word from 0 to {self.words - 1}; got {batch} and {word}"
            )
        last = torch.full((batch,), word, dtype=torch.int64, device=self.word_in.device)
        zero = self.word_in.new_zeros(self.layers, batch, self.dimension)
        return State((zero, zero) if self.cell == "lstm" else zero, last)

    def _outputs(self, words: Tensor, state: State) -> tuple[Tensor, State]:
        """The network's outputs [B, T, d], from which words [B, T] are predicted."""
        before = torch.cat((state.last[:, None], words[:, :-1]), 1)
        outputs, hidden = run(self.recurrent, self.dropout(F.embedding(before, self.word_in)), state.hidden)
        return self.dropout(outputs), State(hidden, words[:, -1])

    def log_prob(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """See `LanguageModel.log_prob`."""
        words = check_words(words, self.words)
        known = words.clamp(min=0)
        outputs, state = self._outputs(known, self.begin(words.shape[0]) if state is None else state)
        flat, targets = outputs.flatten(0, 1), known.flatten()
        if self.adaptive is not None:
            log_probs = self.adaptive(flat, targets).output
        else:
            logits = wide(F.linear(flat, self.word_out, self.word_bias))
            log_probs = -F.cross_entropy(logits, targets, reduction="none")
        return log_probs.view(words.shape).masked_fill(words == PADDING, 0.0), state

    def distribution(self, state: State) -> Tensor:
        """log P of every word to come next, shape [B, V]."""
        output = self._outputs(state.last[:, None], state)[0][:, 0]
        if self.adaptive is not None:
            found: Tensor = self.adaptive.log_prob(output)
            return found
        return wide(F.linear(output, self.word_out, self.word_bias)).log_softmax(1)

    @torch.no_grad()
    def next_words(self, state: State, k: int) -> tuple[Tensor, Tensor]:
        """See `LanguageModel.next_words`; here every word is computed."""
        if not 1 <= k <= self.words:
            raise MismatchError(f"k is 1 to the number of words, {self.words}; got {k}")
        log_probs, words = self.distribution(state).topk(k, dim=1)
        return words, log_probs

    @torch.no_grad()
    def draw(self, state: State, temperature: float, generator: torch.Generator | None) -> tuple[Tensor, State]:
        """See `LanguageModel.draw`."""
        shares = (self.distribution(state) / temperature).softmax(1)
        words = torch.multinomial(shares, 1, generator=generator)[:, 0]
        return words, self.advance(state, words)

    def save(self, folder: str | Path) -> None:
        """Write model.safetensors and model.json into `folder`, which is created if needed."""
        about: dict[str, Any] = {"words": self.words, "dimension": self.dimension, "layers": self.layers}
        about.update(cell=self.cell, tied=self.tied, dropout=self.dropout.p, output="full")
        if self.adaptive is not None:
            about.update(output="adaptive", cutoffs=self.adaptive.cutoffs[:-1])
        storage.save(folder, FORMAT, about, self)

    @classmethod
    def load(cls, folder: str | Path) -> WordRNN:
        """The model that `save` wrote, on the CPU.

        Raises:
            CheckpointError: a file is missing, damaged, or of another save.
        """
        return storage.load(folder, FORMAT, lambda about, table: cls._of(**about))

    @classmethod
    def _of(cls, *, output: str, cutoffs: Sequence[int] = (), **about: Any) -> WordRNN:
        """A model of the shape that `save` wrote down."""
        return cls(output=tuple(cutoffs) or output, **about)


def default_cutoffs(words: int, dimension: int) -> tuple[int, ...]:
    """The default cutoffs of an adaptive softmax over `words` words."""
    found = tuple(cut for n, cut in enumerate(CUTOFFS, 1) if cut < words and dimension >= NARROWER**n)
    return found or (max(1, words // 2),)


def _adaptive(words: int, dimension: int, cutoffs: tuple[int, ...]) -> nn.AdaptiveLogSoftmaxWithLoss:
    if words < 2 or not cutoffs or list(cutoffs) != sorted(set(cutoffs)) or not 0 < cutoffs[0] <= cutoffs[-1] < words:
        raise UnsupportedError(f"cutoffs ascend between 1 and the {words} words less 1, got {cutoffs}")
    if dimension < NARROWER ** len(cutoffs):
        raise UnsupportedError(
            f"{len(cutoffs)} cutoffs leave vectors of {dimension} / {NARROWER ** len(cutoffs)} numbers; take fewer"
        )
    return nn.AdaptiveLogSoftmaxWithLoss(dimension, words, list(cutoffs), NARROWER)


def _check_memory(words: int, dimension: int, device: torch.device, output: Output, **choices: Any) -> None:
    there = available_bytes(device)
    with torch.device("meta"):
        wanted = sizes_of(WordRNN(words, dimension, output=output, **choices))
    if there is not None and wanted.total > there:
        raise UnsupportedError(
            f"a model with one vector of {dimension} numbers for each of {words} words has {gigabytes(wanted.total)} "
            f"of parameters ({gigabytes(wanted.input)} at the input, {gigabytes(wanted.output)} at the output), and "
            f"training takes twice that at least; {device} has {gigabytes(there)} to spare. Take LightRNN, which has "
            f"{gigabytes(light_sizes(words, dimension, **choices).total)}, fewer words or a smaller dimension"
        )


def gigabytes(count: int) -> str:
    """Bytes as text: "80.1 GB"."""
    return f"{count / 1e9:.3g} GB" if count < 10**9 else f"{count / 1e9:.1f} GB"
