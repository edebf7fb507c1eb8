# SPDX-License-Identifier: Apache-2.0
"""Block momentum against numbers that can be worked out by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.rules.outer import Average, BlockMomentum, Nesterov, Outer
from paceline.rules.outer.base import Coefficients

F64 = torch.float64


def at(outer: Outer, block: int, workers: int, ahead: float) -> Coefficients:
    """As a rule makes them."""
    eta, zeta = outer.momentum_at(block, workers), outer.lr_at(block, workers)
    return Coefficients(eta, zeta, ahead, outer.momentum_at(block + 1, workers))


def moves_under_constant(outer: Outer, workers: int, blocks: int, d: float = 0.5) -> list[tuple[float, float]]:
    """(move of the global model, move of the start) of every block when the mean displacement is always `d`."""
    anchor, out = torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64)
    state = {name: torch.zeros(1, dtype=F64) for name in outer.tensors}
    ahead, moves, start_before = 0.0, [], 0.0
    for block in range(1, blocks + 1):
        c = at(outer, block, workers, ahead)
        before = float(anchor)
        assert float(outer.origin(anchor, state, c, out)) == start_before
        start_before_now = float(outer.step(anchor, torch.tensor([d], dtype=F64), state, c, out))
        moves.append((float(anchor) - before, start_before_now - start_before))
        start_before, ahead = start_before_now, c.next_momentum
    return moves


def one_buffer(workers: int, blocks: int, d: float = 0.5) -> float:
    """The last move of the one-buffer "Nesterov" of several code bases, with the publication's constants."""
    eta, v, anchor, move = 1 - 1 / workers, 0.0, 0.0, 0.0
    for _ in range(blocks):
        before = anchor
        v = eta * v + d
        anchor = anchor + v + eta * v
        move = anchor - before
    return move


def assert_steady(move: float, gain: float, d: float = 0.5) -> None:
    """The assertion that the right form passes and the one-buffer form must not."""
    assert move == pytest.approx(gain * d, rel=1e-6)


@pytest.mark.parametrize("workers", [2, 4, 8, 64])
@pytest.mark.parametrize("nesterov", [True, False])
def test_a_constant_displacement_moves_n_times_as_far(workers: int, nesterov: bool) -> None:
    global_move, start_move = moves_under_constant(
        BlockMomentum(gain="paper", nesterov=nesterov), workers, 30 * workers
    )[-1]
    assert_steady(global_move, workers)
    assert_steady(start_move, workers)


@pytest.mark.parametrize("workers", [4, 64])
def test_the_one_buffer_form_fails_the_same_assertion(workers: int) -> None:
    with pytest.raises(AssertionError):
        assert_steady(one_buffer(workers, 30 * workers), workers)
    assert_steady(one_buffer(workers, 30 * workers), 2 * workers - 1)


def test_first_two_blocks_by_hand() -> None:
    # eta .75, zeta 1, d .5: Delta = .5, .875; theta = .5, 1.375; start = theta + .75 Delta = .875, 2.03125
    moves = moves_under_constant(BlockMomentum(0.75, 1.0), 4, 2)
    assert moves == [(0.5, 0.875), (0.875, 2.03125 - 0.875)]
    assert moves_under_constant(BlockMomentum(0.75, 1.0, nesterov=False), 4, 2) == [(0.5, 0.5), (0.875, 0.875)]


def test_with_a_ramp_the_look_ahead_has_the_momentum_of_the_next_block() -> None:
    outer = BlockMomentum(0.8, 1.0, ramp=2)
    assert [outer.momentum_at(n, 4) for n in (1, 2, 3, 4)] == [0.0, 0.4, 0.8, 0.8]
    # Delta_1 = .5 and start_1 = .5 + .4 * .5; Delta_2 = .4 * .5 + .5 = .7, theta_2 = 1.2, start_2 = 1.2 + .8 * .7
    moves = moves_under_constant(outer, 4, 2)
    assert moves[0] == pytest.approx((0.5, 0.7))
    assert moves[1] == pytest.approx((0.7, 1.76 - 0.7))


def rhos(outer: Outer, tau: float, workers: int, blocks: int) -> tuple[list[float], list[float]]:
    """rho and kv of the first blocks."""
    rho, found, ahead = 0.0, [], []
    for block in range(1, blocks + 1):
        rho, kv = outer.equivalent_minibatches(rho, tau, at(outer, block, workers, 0.0))
        found.append(rho)
        ahead.append(kv)
    return found, ahead


def test_equivalent_minibatches_with_the_publications_constants() -> None:
    found, ahead = rhos(BlockMomentum(gain="paper"), 8, 16, 800)
    assert found[:3] == pytest.approx([8, 15.5, 22.53125])
    assert found[-1] == pytest.approx(128)
    counter, counters = 0.0, []
    for kv in ahead:
        counter += 8 + kv
        counters.append(counter)
    assert counters[:3] == pytest.approx([15.5, 38.03125, 67.154], abs=1e-3)
    assert counters[-1] - counters[-2] == pytest.approx(128)  # the counter grows by N tau a block


def test_classical_momentum_is_ahead_by_what_the_block_before_left() -> None:
    found, ahead = rhos(BlockMomentum(0.5, 1.0, nesterov=False), 8, 4, 3)
    assert found == [8, 12, 14]
    assert ahead == [0, 4, 6]  # eta rho_{n-1}
    assert rhos(BlockMomentum(0.5, 1.0), 8, 4, 3)[1] == [4, 6, 7]  # eta rho_n


def test_a_block_rate_that_is_not_one_counts_in_both() -> None:
    assert rhos(BlockMomentum(0.5, 1.5), 8, 4, 2) == ([12, 18], [6 + 4, 9 + 4])
    assert rhos(BlockMomentum(0.5, 1.5, nesterov=False), 8, 4, 2) == ([12, 18], [4, 6 + 4])
    assert rhos(BlockMomentum(0.1, 0.5), 8, 4, 1)[1] == [0.0]  # .1 * 4 - 4 < 0: the start is not ahead


@pytest.mark.parametrize(
    "outer", [BlockMomentum(0.7, 0.9), BlockMomentum(0.7, 0.9, nesterov=False), Nesterov(), Average()]
)
def test_any_cut_of_the_parameters_gives_the_same_bits(outer: Outer) -> None:
    def run(cuts: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        g = torch.Generator().manual_seed(0)
        anchor, start = torch.randn(40, generator=g), torch.zeros(40)
        state = {name: torch.zeros(40) for name in outer.tensors}
        for block in range(1, 5):
            d = torch.randn(40, generator=g)
            for low, high in cuts:
                part = {k: v[low:high] for k, v in state.items()}
                c = at(outer, block, 4, 0.7)
                start[low:high] = outer.step(anchor[low:high], d[low:high], part, c, torch.empty(high - low))
        return anchor, start

    whole, pieces = run([(0, 40)]), run([(0, 7), (7, 8), (8, 40)])
    assert all(torch.equal(a, b) for a, b in zip(whole, pieces, strict=True))


def test_origin_is_where_the_block_began_to_the_bit() -> None:
    outer = BlockMomentum(0.73, 0.7)
    anchor, state = torch.randn(1000), {"delta": torch.zeros(1000)}
    for block in range(1, 6):
        c = Coefficients(0.73, 0.7, 0.73, 0.73)
        start = outer.step(anchor, torch.randn(1000), state, c, torch.empty(1000)).clone()
        assert torch.equal(outer.origin(anchor, state, c, torch.empty(1000)), start), block
