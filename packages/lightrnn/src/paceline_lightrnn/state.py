# SPDX-License-Identifier: Apache-2.0
"""The state of a recurrent model between two calls, and its recurrent networks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline import MismatchError, UnsupportedError

PADDING = -1
"""Marks positions after the end of a sequence that is shorter than its batch."""

CELLS: dict[str, type[nn.RNNBase]] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn": nn.RNN}

Hidden = Any
"""Tensor [layers, B, d], or a pair of them (LSTM)."""


class State(NamedTuple):
    """The state of a batch of sequences.

    Attributes:
        hidden: the recurrent network's state: a tensor of shape [layers, B, d], or a pair of them for an LSTM.
        last: shape [B], int64: the last word of each sequence. The model defines which part of it the network has
            read already.
    """

    hidden: Hidden
    last: Tensor

    def detach(self) -> State:
        """The same values without graph, to truncate back-propagation."""
        return State(each(self.hidden, Tensor.detach), self.last)

    def select(self, sequences: Tensor) -> State:
        """The states of these sequences, shape [n], int64; repeats are allowed."""
        return State(each(self.hidden, lambda h: h.index_select(1, sequences)), self.last[sequences])


def each(hidden: Hidden, change: Callable[[Tensor], Tensor]) -> Hidden:
    """Apply `change` to the tensor, or to both of the pair."""
    return change(hidden) if isinstance(hidden, Tensor) else tuple(change(h) for h in hidden)


def run(network: nn.RNNBase, inputs: Tensor, hidden: Hidden) -> tuple[Tensor, Hidden]:
    """The network's outputs and its state, from a state that may come out of autocast, or None for zeros."""
    if hidden is not None:
        hidden = each(hidden, lambda h: h.to(inputs.dtype))
    found: tuple[Tensor, Hidden] = network(inputs, hidden)
    return found


def make_recurrent(cell: str, dimension: int, layers: int, dropout: float) -> nn.RNNBase:
    """The recurrent network, `batch_first`, input and hidden size `dimension`.

    The biases are zero, and 1 at an LSTM's forget gate, so that the cell keeps its content and gradients from the first
    step on (Gers et al. 2000; Jozefowicz et al., ICML 2015, section 5). The weights keep torch's initialisation,
    uniform within 1 / sqrt(dimension).

    Raises:
        UnsupportedError: there is no such cell, or a number is out of range.
    """
    if cell not in CELLS:
        raise UnsupportedError(f"there is no cell {cell!r}; there are {', '.join(sorted(CELLS))}")
    if dimension < 1 or layers < 1:
        raise UnsupportedError(f"dimension and layers are 1 at least; got {dimension} and {layers}")
    if not 0 <= dropout < 1:
        raise UnsupportedError(f"dropout is a share from 0 to less than 1, got {dropout}")
    between = dropout if layers > 1 else 0.0  # torch warns of dropout with a single layer
    network: nn.RNNBase = CELLS[cell](dimension, dimension, layers, batch_first=True, dropout=between)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, bias in network.named_parameters():
            if name.startswith("bias"):
                bias.zero_()
            if name.startswith("bias_ih") and cell == "lstm":
                bias[dimension : 2 * dimension] = 1.0  # torch's order of gates: input, forget, cell, output
    return network


def check_words(words: Tensor, vocabulary: int) -> Tensor:
    """`words` as int64, if they are of shape [B, T] and in the vocabulary or, at a sequence's end, padding.

    The values are looked at on the CPU only: on a GPU that would make the program wait for it.

    Raises:
        MismatchError: they are not.
    """
    if words.ndim != 2 or words.is_floating_point() or words.dtype == torch.bool or 0 in words.shape:
        raise MismatchError(f"words are integers of shape [B, T], not empty; got {words.dtype} {tuple(words.shape)}")
    words = words.to(torch.int64)
    if words.device.type == "cpu":
        low, high = (int(value) for value in words.aminmax())
        if low < PADDING or high >= vocabulary:
            raise MismatchError(f"words are 0 to {vocabulary - 1}, or {PADDING} for padding; got {low} to {high}")
        if low == PADDING and bool(((words[:, :-1] == PADDING) & (words[:, 1:] != PADDING)).any()):
            raise MismatchError("padding is at the end of a sequence only; here a word comes after it")
    return words


def wide(tensor: Tensor) -> Tensor:
    """In float32 at least: the sums of a softmax over thousands need it."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
