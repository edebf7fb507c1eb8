# SPDX-License-Identifier: Apache-2.0
"""A contribution is packed in the pass over memory that takes its norm, with the bits of a pass of its own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from paceline.communication.base import SoloTransport
from paceline.core.flat import BLOCK_ELEMENTS_CPU
from paceline.core.optimizer_state import Owned
from paceline.core.world import World
from paceline.rules.recipes import rule_from_text
from paceline.rules.topology.flat import Flat
from paceline.update.engine.blocks.fragment import FragmentState, LocalOptimizers
from paceline.update.engine.blocks.outer_state import BlockNumbers, OuterStateChunk, cut_states, measure
from paceline.update.exchange.exchanger import Exchanger

SIZES = [BLOCK_ELEMENTS_CPU * 5 + 1, 3, BLOCK_ELEMENTS_CPU * 4 + 17]
"""Of the tensors, so that their ends, those of the blocks and those of the chunks all lie elsewhere."""


def moved(dtype: torch.dtype) -> tuple[FragmentState, list[OuterStateChunk]]:
    """The outer state of a model that has left its block's start, and its chunks."""
    torch.manual_seed(1)
    model = nn.ParameterList(nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES)
    rule = rule_from_text("bmuf(period=2, momentum=0.5)")
    owned: Owned = [(torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters()))]
    numbers = BlockNumbers(rule, 4)
    numbers.ahead = 0.5
    state = FragmentState(model, LocalOptimizers(rule.delta, owned), numbers, None, World)
    exchanger = Exchanger(SoloTransport(), rule.codec, Flat())
    with torch.no_grad():
        for one in state.parameters:
            one.tensors["delta"].normal_()
        for parameter in model:
            parameter.mul_(1.25)
    return state, cut_states(state.all, exchanger, numbers, measured=True)


class KeepingExchanger(Exchanger):
    """Keeps contributions, as an exchange does that may be repeated."""

    @property
    def keeps(self) -> bool:
        return True


@pytest.mark.parametrize("measured", [True, False])
def test_what_an_exchange_keeps_is_not_overwritten_by_later_chunks(measured: bool) -> None:
    (state, _), rule = moved(torch.float32), rule_from_text("bmuf(period=2)")
    exchanger = KeepingExchanger(SoloTransport(), rule.codec, Flat())
    chunks = cut_states(state.all, exchanger, BlockNumbers(rule, 4), measured=measured)
    wanted, kept = filled(chunks, 1.0), [chunk.fill(1.0) for chunk in chunks]
    assert len(chunks) == Flat.chunks
    assert all(torch.equal(one, other) for one, other in zip(kept, wanted, strict=True))


def filled(chunks: list[OuterStateChunk], factor: float) -> list[Tensor]:
    return [chunk.fill(factor).clone() for chunk in chunks]


@pytest.mark.parametrize("own", [True, False], ids=["own", "shared"])
@pytest.mark.parametrize("factor", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_what_is_packed_with_the_norm_has_the_same_bits(dtype: torch.dtype, factor: float, own: bool) -> None:
    state, chunks = moved(dtype)
    norm, wanted = measure(state.all, []), filled(chunks, factor)
    if not own:
        chunks[5:] = [OuterStateChunk(c.outer, c.begin, c.end, chunks[2]._wire, c._numbers) for c in chunks[5:]]
    assert measure(state.all, chunks) == norm
    assert len(chunks) == Flat.chunks
    assert [chunk.packed for chunk in chunks] == [own or number < 5 for number in range(len(chunks))]
    found = filled(chunks, factor)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_what_was_packed_is_used_once() -> None:
    state, chunks = moved(torch.float32)
    measure(state.all, chunks)
    before = filled(chunks, 1.0)
    with torch.no_grad():
        for one in state.parameters:
            one.restore()  # the model is back at the block's start
    assert all(float(one.norm()) > 0 for one in before)
    assert all(float(one.norm()) == 0 for one in filled(chunks, 1.0))


def test_a_block_of_inf_or_nan_is_found_and_not_sent() -> None:
    state, chunks = moved(torch.float32)
    with torch.no_grad():
        state.parameters[0].fragment.tensors[0][-1] = float("nan")
    assert measure(state.all, chunks) == (0.0, False)
    assert not any(bool(one.any()) for one in filled(chunks, 0.0))
