# SPDX-License-Identifier: Apache-2.0
"""Generates text with a language model: by sampling or by beam search."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from paceline import UnsupportedError
from paceline_lightrnn.language import LanguageModel
from paceline_lightrnn.state import PADDING, State

FIRST_WORDS = 64


@torch.no_grad()
def sample(
    model: LanguageModel,
    state: State,
    length: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Draw words one after another. Dropout is off meanwhile.

    Without `top_k` and `top_p` a LightRNN draws a row, then a column in it, and computes no other row; the temperature
    then applies to both draws. With them, the best words are found exactly, and the temperature applies to these.

    Args:
        model: trained.
        state: of the B sequences to continue.
        length: words to draw for each.
        temperature: above 0; below 1 sharpens the distribution, above 1 flattens it.
        top_k: draw among the k most probable words only; 1 always takes the best.
        top_p: draw among the smallest set of words whose probability (before temperature) reaches this; above 0, at
            most 1.
        generator: of the random numbers, on the model's device; None for torch's own.

    Returns:
        Words, shape [B, length].

    Raises:
        UnsupportedError: a number is out of range.
        MismatchError: there are fewer than `top_k` words.
    """
    if length < 1 or not temperature > 0:
        raise UnsupportedError(f"length is 1 at least and temperature above 0; got {length} and {temperature}")
    if top_p is not None and not 0 < top_p <= 1:
        raise UnsupportedError(f"top_p is a share above 0 and at most 1, got {top_p}")
    found = []
    with _evaluating(model):
        for _ in range(length):
            if top_k is None and top_p is None:
                words, state = model.draw(state, temperature, generator)
            else:
                names, log_probs = _candidates(model, state, top_k, top_p)
                places = torch.multinomial((log_probs / temperature).softmax(1), 1, generator=generator)
                words = names.gather(1, places)[:, 0]
                state = model.advance(state, words)
            found.append(words)
    return torch.stack(found, 1)


def _candidates(model: LanguageModel, state: State, top_k: int | None, top_p: float | None) -> tuple[Tensor, Tensor]:
    """The words to draw from, [B, n], and their log-probabilities, minus infinity for excluded ones."""
    if top_p is None:
        assert top_k is not None
        return model.next_words(state, top_k)
    most = model.words if top_k is None else top_k
    k = min(FIRST_WORDS, most)
    while True:
        names, log_probs = model.next_words(state, k)
        share = log_probs.exp().cumsum(1)
        if k == most or bool((share[:, -1] >= top_p).all()):
            break
        k = min(4 * k, most)
    enough = torch.cat((torch.zeros_like(share[:, :1]), share[:, :-1]), 1) >= top_p  # without this word already
    return names, log_probs.masked_fill(enough, -float("inf"))


@torch.no_grad()
def beam(
    model: LanguageModel, state: State, length: int, width: int, *, end: int | None = None, length_penalty: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The most probable continuation that beam search finds. Dropout is off meanwhile.

    After each word the `width` best continuations are kept. The best has the highest
    log P / (number of words) ** length_penalty. A continuation that ends competes with the longer ones.

    Args:
        model: trained.
        state: of the B sequences to continue.
        length: most words.
        width: continuations kept for each sequence; the search is exhaustive from V ** (length - 1) on.
        end: the last word of a complete continuation; None for none.
        length_penalty: 0 compares log P, which favours short ones; 1 compares the mean of a word.

    Returns:
        Words, shape [B, length], with `PADDING` after `end`; their log P, shape [B], without the penalty.

    Raises:
        UnsupportedError: a number is out of range.
    """
    if length < 1 or width < 1:
        raise UnsupportedError(f"length and width are 1 at least; got {length} and {width}")
    batch, device = state.last.numel(), state.last.device
    words = torch.empty(batch, 1, 0, dtype=torch.int64, device=device)
    log_probs, counts = torch.zeros(batch, 1, device=device), torch.zeros(batch, 1, device=device)
    ended = torch.zeros(batch, 1, dtype=torch.bool, device=device)
    with _evaluating(model):
        for step in range(length):
            k = min(width, model.words)
            names, gains = (found.view(batch, -1, k) for found in model.next_words(state, k))
            names, gains = _stay(names, gains, ended)
            totals = (log_probs[..., None] + gains).flatten(1)
            numbers = (counts + ~ended)[..., None].expand_as(names).flatten(1)
            kept = (totals / numbers**length_penalty).topk(min(width, totals.shape[1]), dim=1).indices
            parents, chosen = kept // k, names.flatten(1).gather(1, kept)
            log_probs, counts = totals.gather(1, kept), numbers.gather(1, kept)
            before = words.gather(1, parents[..., None].expand(-1, -1, words.shape[2]))
            words = torch.cat((before, chosen[..., None]), 2)
            ended = ended.gather(1, parents) | (chosen == (PADDING if end is None else end))
            if step == length - 1 or bool(ended.all()):
                break
            lines = (torch.arange(batch, device=device)[:, None] * (totals.shape[1] // k) + parents).flatten()
            state = model.advance(state.select(lines), chosen.flatten().clamp(min=0))
    best = (log_probs / counts**length_penalty).argmax(1)
    lines = torch.arange(batch, device=device)
    found = torch.full((batch, length), PADDING, device=device)
    found[:, : words.shape[2]] = words[lines, best]
    return found, log_probs[lines, best]


def _stay(names: Tensor, gains: Tensor, ended: Tensor) -> tuple[Tensor, Tensor]:
    """Continue complete sequences by padding only, at no cost."""
    names = names.masked_fill(ended[..., None], PADDING)
    gains = gains.masked_fill(ended[..., None], -float("inf"))
    gains[..., 0] = gains[..., 0].masked_fill(ended, 0.0)
    return names, gains


@contextmanager
def _evaluating(model: LanguageModel) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
