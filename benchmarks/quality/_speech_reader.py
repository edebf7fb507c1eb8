# SPDX-License-Identifier: Apache-2.0
"""A bidirectional LSTM that can be stacked, for CTC.

`torch.func` cannot stack `nn.LSTM`. Here both directions, and all stacked workers, are one leading dimension of one
recurrence, so each time step is one batched product and a few element-wise operations for all of them. The direction
that goes back reads each utterance turned around within its own length; padding comes behind and changes nothing.

    o, i, f = sigmoid(a_o, a_i, a_f),  g = tanh(a_g),    a = W x + U h + b
    c = f c + i g,    h = o tanh(c)

Sources: A. Graves, J. Schmidhuber, Neural Networks 18 (2005), for the LSTM; A. Graves et al., ICML 2006, for CTC.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import _ctc
import torch
import torch.nn.functional as F
from _ctc import in_front
from _reading import error_rate
from _speech import FEATURES, SYMBOLS, kept, noisy
from torch import Tensor, nn

TUNING, FINAL = 512, 1_024  # utterances


class Recurrence(torch.autograd.Function):
    """LSTMs beside each other, L of them, each with its own U."""

    @staticmethod
    def forward(given: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W x + b (L, B, T, 4 H) and U (L, 4 H, H) -> h (L, B, T, H); for the way back, time first, gates, c and h."""
        number, batch, times, wide = given.shape
        hidden = wide // 4
        gates = given.permute(2, 0, 1, 3).contiguous()
        if gates.data_ptr() == given.data_ptr():
            gates = gates.clone()  # the gates are written over
        cells, states = gates.new_empty(2, times, number, batch, hidden)
        turned = u.transpose(1, 2).contiguous()
        h = c = gates.new_zeros(number, batch, hidden)
        for a, sig, o, i, f, g, now, state in _parts(gates, cells, states):
            a.baddbmm_(h, turned)
            sig.sigmoid_()
            g.tanh_()
            torch.mul(f, c, out=now)
            now.addcmul_(i, g)
            torch.tanh(now, out=state)
            state.mul_(o)
            c, h = now, state
        return states.permute(1, 2, 0, 3), gates, cells, states

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: tuple[Tensor, ...]) -> None:
        """Keep what the way back needs."""
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[1], *output[1:])

    @staticmethod
    def backward(ctx: Any, upper: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Gradients of both; what does not wait for another time is computed for all times at once."""
        u, gates, cells, states = ctx.saved_tensors
        hidden = u.shape[2]
        o, i, f, g = gates.split(hidden, 3)
        tanh = cells.tanh()
        through = (1 - tanh.square()).mul_(o)
        before = F.pad(cells, (0, 0) * 3 + (1, 0))[:-1]
        share = torch.cat([tanh * o * (1 - o), g * i * (1 - i), before * f * (1 - f), i * (1 - g.square())], 3)
        out = torch.empty_like(gates)
        wanted = upper.permute(2, 0, 1, 3).contiguous()
        dc, later = torch.zeros_like(cells[0]), None
        for a, to_o, to_rest, by_o, by_rest, dh, keeps, c_share in _parts_back(out, share, wanted, f, through):
            if later is not None:
                dh = torch.baddbmm(dh, later[0], u)
                dc = dc * later[1]
            dc = torch.addcmul(dc, dh, c_share)
            torch.mul(by_o, dh, out=to_o)
            torch.mul(by_rest, dc.unsqueeze(2), out=to_rest)
            later = a, keeps
        flat = out.permute(1, 0, 2, 3).flatten(1, 2)
        past = F.pad(states, (0, 0) * 3 + (1, 0))[:-1].permute(1, 0, 2, 3).flatten(1, 2)
        return out.permute(1, 2, 0, 3), flat.transpose(1, 2) @ past

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[int | None, ...], given: Tensor, u: Tensor
    ) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        """All workers' LSTMs beside each other."""
        stacked = in_front(info.batch_size, in_dims, (given, u))
        h, gates, cells, states = Recurrence.apply(*(tensor.flatten(0, 1) for tensor in stacked))
        parts = (tensor.unflatten(1, (info.batch_size, -1)) for tensor in (gates, cells, states))
        return (h.unflatten(0, (info.batch_size, -1)), *parts), (0, 1, 1, 1)


def _parts(gates: Tensor, cells: Tensor, states: Tensor) -> Any:
    """Of each time: all gates, o i f, each of the four, c and h."""
    hidden = cells.shape[3]
    views = [gates, gates[..., : 3 * hidden], *gates.split(hidden, 3), cells, states]
    return zip(*(view.unbind(0) for view in views), strict=True)


def _parts_back(out: Tensor, share: Tensor, *others: Tensor) -> Any:
    """Of each time, the last first: all gates, of `out` and then of `share` o and the others (L, B, 3, H), and more."""
    hidden = share.shape[3] // 4
    views = [out]
    for gates in (out, share):
        views += [gates[..., :hidden], gates[..., hidden:].unflatten(3, (3, hidden))]
    return zip(*(reversed(view.unbind(0)) for view in (*views, *others)), strict=True)


class Bidirectional(nn.Module):
    """An LSTM each way; gates in the order o, i, f, g, first those of the way forward."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.given = nn.Linear(features, 8 * hidden)
        self.u = nn.Parameter(torch.empty(2, 4 * hidden, hidden))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(hidden**-0.5), hidden**-0.5)
        with torch.no_grad():
            self.given.bias.view(2, 4, hidden)[:, 2] += 1.0  # remember at first

    def forward(self, heard: Tensor, turned: Tensor) -> Tensor:
        """(B, T, features) -> (B, T, 2 H); `turned` (B, T) are the places of each utterance in the other order."""
        batch, times = turned.shape
        # Two dimensions: with three, stacked products would copy the weights for each utterance.
        both = self.given(heard.reshape(batch * times, -1)).view(batch, times, 2, -1)
        states = Recurrence.apply(torch.stack([both[:, :, 0], _reordered(both[:, :, 1], turned)]), self.u)[0]
        return torch.cat([states[0], _reordered(states[1], turned)], 2)


def _reordered(x: Tensor, places: Tensor) -> Tensor:
    return x.gather(1, places[:, :, None].expand(-1, -1, x.shape[2]))


class Listener(nn.Module):
    """Scores of a symbol (0 is CTC's blank) at each step of an utterance."""

    def __init__(self, hidden: int, layers: int) -> None:
        super().__init__()
        sizes = [FEATURES] + [2 * hidden] * (layers - 1)
        self.layers = nn.ModuleList(Bidirectional(size, hidden) for size in sizes)
        self.output = nn.Linear(2 * hidden, SYMBOLS)

    def forward(self, heard: Tensor, times: Tensor) -> Tensor:
        """(B, T, FEATURES) of which `times` (B,) are not padding -> (B, T, SYMBOLS)."""
        places = torch.arange(heard.shape[1]).expand(heard.shape[:2])
        turned = torch.where(places < times[:, None], times[:, None] - 1 - places, places)
        for layer in self.layers:
            heard = layer(heard, turned)
        return self.output(heard.flatten(0, 1)).view(*heard.shape[:2], SYMBOLS)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, heard: Tensor, times: Tensor, numbers: Tensor, lengths: Tensor) -> Tensor:
    """CTC loss in nats per letter."""
    return _ctc.loss_of(model(heard, times), times, numbers, lengths)


@torch.no_grad()
def read(model: nn.Module, heard: Tensor, times: Tensor) -> list[list[int]]:
    """Symbols by greedy decoding."""
    best = model(heard, times).argmax(2)
    return [_ctc.symbols_of(row[:length]) for row, length in zip(best, times.tolist(), strict=True)]


@torch.no_grad()
def letter_error(model: nn.Module, folder: Path) -> float:
    """Edits per letter of utterances in other manners; the first TUNING choose the rate, the rest is judged."""
    said = kept(folder, "held-out", TUNING + FINAL, held_out=True)
    heard = noisy(said.powers, said.noises, torch.Generator().manual_seed(0))
    parts = zip(heard.split(256), said.times.split(256), strict=True)
    readings = [found for part, times in parts for found in read(model, part, times)]
    letters = [row[:length].tolist() for row, length in zip(said.numbers, said.lengths, strict=True)]
    return error_rate(readings[TUNING:], letters[TUNING:])
