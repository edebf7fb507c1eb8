# SPDX-License-Identifier: Apache-2.0
"""Models of Hugging Face's `transformers` as P(y | x) and P(x) (`pip install 'paceline-dual[transformers]'`).

Symbols are the model's own token numbers; begin, end and padding are added here and never part of a sequence::

    encoder         source_begin? x[0] .. x[S-1] end
    decoder         start target_begin? y[0] .. y[T-1]   ->   y[0] .. y[T-1] end

Sampling and the beam are those of :mod:`paceline_dual.search`, with the model's cache of keys and values, and not the
model's `generate`: that one adds rules of its own (the 50 best tokens only, forced tokens, bonuses for length), after
which a sample is no longer a draw from P(y | x), and it takes no generator.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline import MismatchError, UnsupportedError
from paceline_dual import search
from paceline_dual.protocols import repeat, undisturbed
from paceline_dual.sequences import PADDING, check, check_count, check_pairs, mask

Forward = Callable[..., Any]


class HuggingFaceSeq2Seq(nn.Module):
    """P(y | x) by an encoder-decoder of `transformers`: T5, Bart, Marian, mBart and the like.

    Args:
        model: what `AutoModelForSeq2SeqLM` gives; it is trained as it is, and saved by its own `save_pretrained`.
        longest: most tokens of a y, a sample or a candidate.
        source_begin: a token that the model wants before each x, as Bart its <s> and mBart the language.
        target_begin: a token that the model wants before each y, after the decoder's start; it is given, not scored.

    Raises:
        UnsupportedError: the model is no encoder-decoder, or its configuration lacks the end or the decoder's start.
    """

    def __init__(
        self, model: Any, longest: int = 64, *, source_begin: int | None = None, target_begin: int | None = None
    ) -> None:
        super().__init__()
        config = getattr(model, "config", None)
        if not getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{type(model).__name__} is no encoder-decoder of transformers; take what AutoModelForSeq2SeqLM gives"
            )
        self.model: Any = model
        self.longest = _check_longest(longest)
        self.end = _token(model, "eos_token_id")
        self.before_x = [] if source_begin is None else [source_begin]
        self.before_y = [_token(model, "decoder_start_token_id", "bos_token_id", "pad_token_id")]
        self.before_y += [] if target_begin is None else [target_begin]

    @classmethod
    def from_pretrained(cls, name: str | Path, longest: int = 64, **options: Any) -> HuggingFaceSeq2Seq:
        """The model in this folder or of this name; only weights in safetensors are read, nothing is unpickled."""
        return cls(_library().AutoModelForSeq2SeqLM.from_pretrained(name, use_safetensors=True), longest, **options)

    def log_prob(self, y: Tensor, x: Tensor) -> Tensor:
        """log P(y | x) [B] of tokens y [B, T] and x [B, S], the end of y included.

        Raises:
            MismatchError: there are not as many y as x, or they are no tokens of this model, or hold its end.
        """
        check_pairs(y, x)
        y = _check_tokens(y, _outputs(self.model), self.longest, self.end, "targets y")
        tokens, there = self._source(x)
        return _log_prob(
            lambda given: self.model(input_ids=tokens, attention_mask=there, decoder_input_ids=given, use_cache=False),
            y,
            self.before_y,
            self.end,
            self.longest,
        )

    def sample(self, x: Tensor, k: int, *, generator: torch.Generator | None = None) -> Tensor:
        """k independent draws from P(. | x) for each x [B, S], [B, k, T]; see `Conditional.sample`."""
        check_count(k)
        with undisturbed(self):
            return search.sample(self._steps(x, k), len(x), k, x.device, generator)

    def beam(self, x: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """The k best y of a beam of k for each x [B, S], and log P(y | x); see `search.beam`."""
        check_count(k)
        with undisturbed(self):
            return search.beam(self._steps(x, k), len(x), k, x.device)

    def _source(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The encoder's input and its mask."""
        x = _check_tokens(x, self.model.get_input_embeddings().weight.shape[0], None, self.end, "sources x")
        there = F.pad(mask(x), (len(self.before_x) + 1, 0), value=True)
        ends = F.pad(x, (0, 1), value=PADDING).scatter(1, mask(x).sum(1, keepdim=True), self.end)
        tokens = torch.cat((_rows(self.before_x, x), ends), 1)
        return tokens.masked_fill(~there, _pad(self.model)), there.long()

    def _steps(self, x: Tensor, k: int) -> _Writing:
        tokens, there = self._source(x)
        encoded = self.model.get_encoder()(input_ids=tokens, attention_mask=there)
        context = {"hidden": repeat(encoded.last_hidden_state, k), "there": repeat(there, k)}

        def forward(ids: Tensor, hidden: Tensor, there: Tensor, **more: Any) -> Any:
            return self.model(
                encoder_outputs=type(encoded)(last_hidden_state=hidden),
                attention_mask=there,
                decoder_input_ids=ids,
                **more,
            )

        return _Writing(forward, context, _rows(self.before_y, x, len(x) * k), self.end, _outputs(self.model), self, k)


class HuggingFaceLanguageModel(nn.Module):
    """P(x) by a causal language model of `transformers`: GPT-2 and the like.

    Args:
        model: what `AutoModelForCausalLM` gives.
        longest: most tokens of an x or a sample.
        begin: the token before each x, given and not scored; otherwise the model's own bos token, or else its eos.

    Raises:
        UnsupportedError: the model is not causal, or its configuration lacks the end.
    """

    def __init__(self, model: Any, longest: int = 64, *, begin: int | None = None) -> None:
        super().__init__()
        config = getattr(model, "config", None)
        if config is None or getattr(config, "is_encoder_decoder", False):
            raise UnsupportedError(
                f"{type(model).__name__} is no causal language model of transformers; take what AutoModelForCausalLM "
                "gives"
            )
        self.model: Any = model
        self.longest = _check_longest(longest)
        self.end = _token(model, "eos_token_id")
        self.before = [_token(model, "bos_token_id", "eos_token_id") if begin is None else begin]

    @classmethod
    def from_pretrained(cls, name: str | Path, longest: int = 64, **options: Any) -> HuggingFaceLanguageModel:
        """The model in this folder or of this name; only weights in safetensors are read, nothing is unpickled."""
        return cls(_library().AutoModelForCausalLM.from_pretrained(name, use_safetensors=True), longest, **options)

    def log_prob(self, x: Tensor) -> Tensor:
        """log P(x) [B] of tokens [B, T], their end included; MismatchError if they are none of this model."""
        x = _check_tokens(x, _outputs(self.model), self.longest, self.end, "sequences x")
        return _log_prob(
            lambda given: self.model(input_ids=given, use_cache=False), x, self.before, self.end, self.longest
        )

    def sample(self, n: int, *, generator: torch.Generator | None = None) -> Tensor:
        """n independent draws, [n, T], without gradient and without dropout."""
        check_count(n)
        device = self.model.get_input_embeddings().weight.device
        rows = torch.tensor([self.before] * n, device=device)
        with undisturbed(self):
            steps = _Writing(
                lambda ids, **more: self.model(input_ids=ids, **more),
                {},
                rows,
                self.end,
                _outputs(self.model),
                self,
                1,
            )
            return search.sample(steps, n, 1, device, generator)[:, 0]


class _Writing(search.Steps):
    """k unfinished sequences for each input. The model's end token moves to the last place, as `Steps` needs it."""

    cache: Any

    def __init__(
        self,
        forward: Forward,
        context: dict[str, Tensor],
        begin: Tensor,
        end: int,
        words: int,
        limits: HuggingFaceSeq2Seq | HuggingFaceLanguageModel,
        k: int,
    ) -> None:
        self.forward, self.context, self.end, self.k = forward, context, end, k
        self.words, self.longest = words, limits.longest
        self.written = begin  # [inputs * k, tokens so far]
        self.begun, self.cache = False, None

    def step(self, last: Tensor) -> Tensor:
        """See `Steps.step`."""
        if self.begun:  # a row that has ended goes on with its end
            tokens = last.masked_fill(last == self.words, self.end)
            self.written = torch.cat((self.written, tokens.view(-1, 1)), 1)
        self.begun = True
        ids = self.written if self.cache is None else self.written[:, -1:]
        output = self.forward(ids, **self.context, past_key_values=self.cache, use_cache=True)
        cache = output.past_key_values
        self.cache = cache if hasattr(cache, "batch_select_indices") else None  # without it: recompute all positions
        log_probs = _precise(output.logits[:, -1]).log_softmax(-1).view(*last.shape, -1)
        ends = log_probs[..., self.end : self.end + 1].clone()
        log_probs[..., self.end] = -torch.inf
        return torch.cat((log_probs, ends), -1)

    def reorder(self, rows: Tensor) -> None:
        """See `Steps.reorder`."""
        first = torch.arange(rows.shape[0], device=rows.device)[:, None] * self.k
        order = (first + rows).flatten()
        self.written = self.written[order]
        if self.cache is not None:
            self.cache.reorder_cache(order)

    def keep(self, inputs: Tensor) -> None:
        """See `Steps.keep`."""
        order = (inputs[:, None] * self.k + torch.arange(self.k, device=inputs.device)).flatten()
        self.written = self.written[order]
        self.context = {name: tensor[order] for name, tensor in self.context.items()}
        if self.cache is not None:
            self.cache.batch_select_indices(order)


def _log_prob(forward: Forward, y: Tensor, before: list[int], end: int, longest: int) -> Tensor:
    """log P [B] of checked tokens y [B, T] and their end, which is certain after `longest` tokens."""
    there = mask(y)
    tokens = y.masked_fill(~there, end)
    given = torch.cat((_rows(before, y), tokens), 1)[:, : len(before) - 1 + longest]
    logits = _precise(forward(given).logits[:, len(before) - 1 :])
    targets = F.pad(tokens, (0, 1), value=end)[:, :longest]
    asked = F.pad(there, (1, 0), value=True)[:, :longest]  # each token, and the end after the last one
    losses = F.cross_entropy(logits[:, : targets.shape[1]].flatten(0, 1), targets.flatten(), reduction="none")
    return -losses.view_as(targets).masked_fill(~asked, 0.0).sum(1)


def _precise(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _rows(tokens: list[int], like: Tensor, count: int | None = None) -> Tensor:
    """The same tokens for each row of `like`, or for so many rows."""
    row = torch.tensor(tokens, dtype=torch.int64, device=like.device)
    return row.expand(len(like) if count is None else count, -1)


def _check_tokens(x: Tensor, words: int, longest: int | None, end: int, name: str) -> Tensor:
    x = check(x, words, longest, name)
    if (x == end).any():
        raise MismatchError(f"{name} hold the token {end}, the model's end; leave it out, it is added by itself")
    return x


def _check_longest(longest: int) -> int:
    if longest < 1:
        raise UnsupportedError(f"longest is {longest}; it takes 1 at least")
    return longest


def _outputs(model: Any) -> int:
    """The number of tokens that the model predicts."""
    return int(model.get_output_embeddings().weight.shape[0])


def _pad(model: Any) -> int:
    """The model's padding token; 0 if it has none, since padding is masked."""
    token = getattr(model.config, "pad_token_id", None)
    return 0 if token is None else int(token)


def _token(model: Any, *names: str) -> int:
    """The first of these tokens in the model's configuration; of several ends the first."""
    for name in names:
        token = getattr(model.config, name, None)
        if token is None:
            token = getattr(getattr(model, "generation_config", None), name, None)
        if isinstance(token, (list, tuple)) and token:
            token = token[0]
        if isinstance(token, int):
            return token
    raise UnsupportedError(
        f"the configuration of {type(model).__name__} has no {' and no '.join(names)}; set model.config.{names[0]}"
    )


def _library() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise UnsupportedError(
            "models of Hugging Face need transformers, which is missing: pip install 'paceline-dual[transformers]'"
        ) from error
    return transformers
