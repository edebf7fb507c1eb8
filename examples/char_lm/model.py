# SPDX-License-Identifier: Apache-2.0
"""A small character model: an embedding, one LSTM and a linear output, about 100,000 parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from data import VOCABULARY, Chunks, decode, encode

CONTEXT = 8  # leading characters of a chunk that only warm the state up


class CharLM(nn.Module):
    """Predicts the next character at each place of a chunk."""

    def __init__(self, hidden: int = 128, embedding: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.output = nn.Linear(hidden, VOCABULARY)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Logits (sequences, length, vocabulary) for characters (sequences, length)."""
        states, _ = self.lstm(self.embedding(characters))
        return self.output(states)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean cross entropy in nats per character, without the CONTEXT places at the start."""
        states, _ = self.lstm(self.embedding(inputs))
        logits = self.output(states[:, CONTEXT:])
        return F.cross_entropy(logits.flatten(0, 1), targets[:, CONTEXT:].flatten())


@torch.no_grad()
def validation_loss(model: CharLM, text: torch.Tensor, length: int = 128) -> float:
    """Mean loss over all of `text`, in nats per character."""
    chunks = Chunks(text, length, CONTEXT)
    batches = torch.arange(len(chunks)).split(64)
    total = sum(model.loss(*chunks.__getitems__(batch.tolist())).item() * len(batch) for batch in batches)
    return total / len(chunks)


@torch.no_grad()
def generate(model: CharLM, prompt: str, length: int, seed: int, temperature: float = 0.6) -> str:
    """`prompt` and `length` characters that the model puts behind it."""
    generator = torch.Generator().manual_seed(seed)
    characters = encode(prompt).long()
    states, memory = model.lstm(model.embedding(characters))
    for _ in range(length):
        chances = torch.softmax(model.output(states[-1]) / temperature, dim=0)
        drawn = torch.multinomial(chances, 1, generator=generator)
        characters = torch.cat([characters, drawn])
        states, memory = model.lstm(model.embedding(drawn), memory)
    return decode(characters)
