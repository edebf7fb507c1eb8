# SPDX-License-Identifier: Apache-2.0
"""LightRNN and a full softmax as programs of `torch.export`: a word in, the ten most probable next ones out."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline_lightrnn import LightRNN, NextWords, WordRNN

K = 10
Hidden = tuple[Tensor, Tensor]


class FullNextWords(nn.Module):
    """The same for a softmax over all words."""

    def __init__(self, model: WordRNN) -> None:
        super().__init__()
        self.word_in, self.word_out, self.word_bias = model.word_in, model.word_out, model.word_bias
        network = model.recurrent
        self.weights = nn.ParameterList(
            [network.weight_ih_l0, network.weight_hh_l0, network.bias_ih_l0, network.bias_hh_l0]
        )

    def forward(self, word: Tensor, hidden: Hidden) -> tuple[Tensor, Tensor, Hidden]:
        hidden = torch.lstm_cell(F.embedding(word, self.word_in), hidden, *self.weights)
        log_probs, words = F.linear(hidden[0], self.word_out, self.word_bias).log_softmax(1).topk(K, 1)
        return words, log_probs, hidden


def programs(light: LightRNN, folder: Path) -> dict[str, tuple[Any, Any]]:
    """By name the loaded program and its first state; each is in a file of `folder`."""
    full = FullNextWords(WordRNN(light.words, light.dimension).eval())
    step = NextWords(light, K)
    zero = torch.zeros(1, light.dimension)
    found = {}
    for name, module, state in (("light", step, step.begin(1)), ("full", full, (zero, zero.clone()))):
        path = folder / f"{name}.pt2"
        torch.export.save(torch.export.export(module.eval(), (torch.tensor([0]), state)), path)
        found[name] = torch.export.load(path).module(), state
    return found


@torch.no_grad()
def measure(light: LightRNN, text: Tensor, folder: Path) -> dict[str, Any]:
    """Bytes, milliseconds a word on one thread (medians, both in turn), and how often LightRNN's answer is exact.

    Args:
        light: a trained model.
        text: shape [n], words that it reads.
        folder: for the programs.
    """
    found = programs(light.eval(), folder)
    states = {name: state for name, (_, state) in found.items()}
    times: dict[str, list[float]] = {name: [] for name in found}
    exact = []
    for word in text.split(1):
        for name, (program, _) in found.items():
            began = time.perf_counter()
            told = program(word, states[name])
            times[name].append(time.perf_counter() - began)
            states[name] = told[-1]
            if name == "light":
                exact.append(float(told[2]))
    return {
        "bytes": {name: (folder / f"{name}.pt2").stat().st_size for name in found},
        "ms": {name: round(1e3 * statistics.median(each), 3) for name, each in times.items()},
        "exact": round(statistics.fmean(exact), 4),
    }
