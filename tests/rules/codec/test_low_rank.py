# SPDX-License-Identifier: Apache-2.0
"""PowerSGD against dense linear algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.errors import RuleError
from paceline.rules.codec import Layout, LowRank, State
from tests.rules.codec.lockstep import exchange

F64 = torch.float64


def product(rows: int, rank: int, columns: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator, dtype=F64)
    return left @ torch.randn(rank, columns, generator=generator, dtype=F64)


def test_five_exchanges_against_projections() -> None:
    """P spans sum_i M_i Q; the total is its projection of the sum, whatever basis is taken."""
    layout, codec = Layout.of([(30, 44)]), LowRank(rank=3)
    states: list[State] = [{}, {}, {}]
    residual = torch.zeros(3, 30, 44, dtype=F64)
    q: Tensor | None = None
    for number in range(5):
        xs = [product(30, 30, 44, 10 * number + i) for i in range(3)]
        outcome = exchange(codec, [x.flatten() for x in xs], layout, states)
        m = torch.stack(xs) + residual
        if q is not None:
            a = m.sum(0) @ q
            projector = a @ torch.linalg.pinv(a)
            torch.testing.assert_close(outcome.totals[0].view(30, 44), projector @ m.sum(0))
        states = outcome.states
        residual = torch.stack([state["residual"].view(30, 44) for state in states])
        assert torch.linalg.matrix_rank(outcome.totals[0].view(30, 44)) == 3
        q = states[0]["q"].view(44, 3)  # Q = (sum_i M_i)^T P, not normalised
        torch.testing.assert_close(q @ q.t(), (t := outcome.totals[0].view(30, 44)).t() @ t)


def test_vectors_and_small_matrices_go_as_they_are() -> None:
    layout = Layout.of([(20, 30), (20,), (4, 4), (64, 3, 1, 1)])
    x = torch.randn(layout.numel)
    outcome = exchange(LowRank(rank=4), [x, 2 * x], layout)
    dense = torch.ones(layout.numel, dtype=torch.bool)
    dense[:600] = False
    dense[636:] = True
    assert torch.equal(outcome.totals[0][dense], (3 * x)[dense])
    assert not outcome.errors[0][dense].any() and outcome.errors[0][:600].any()
    first, second = 20 * 4 + 20 + 16 + 64 * 3, 30 * 4
    assert LowRank(rank=4, min_rate=1.5).bytes_sent(layout, 2, 0) == 4 * first + 4 * second
    assert LowRank(rank=4, min_rate=1000).bytes_sent(layout, 2, 0) == 4 * layout.numel


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e30])
@pytest.mark.parametrize("rank_of_it", [1, 2])
def test_any_rank_and_magnitude_is_finite(scale: float, rank_of_it: int) -> None:
    layout, states = Layout.of([(64, 80)]), [State(), State()]
    matrix = product(64, rank_of_it, 80, 5).float().flatten() * scale
    for _ in range(4):
        outcome = exchange(LowRank(rank=4), [matrix, matrix], layout, states)
        states = outcome.states
        assert outcome.totals[0].isfinite().all()
        assert all(tensor.isfinite().all() for state in states for tensor in state.values())
    torch.testing.assert_close(outcome.totals[0] / (scale or 1), 2 * matrix / (scale or 1), rtol=1e-3, atol=1e-3)


def test_the_first_factor_is_the_matrix_own_and_no_global_generator_moves() -> None:
    layout = Layout.of([(40, 40), (40, 40)])
    x = torch.randn(1600).repeat(2)
    before = torch.get_rng_state()
    total = exchange(LowRank(rank=2), [x, x], layout).totals[0]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(exchange(LowRank(rank=2), [x, x], layout).totals[0], total)
    assert not torch.allclose(total[:1600], total[1600:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank must be a whole number, at least 1, got 0"),
        ({"rank": 1.5}, "rank must be a whole number, at least 1, got 1.5"),
        ({"min_rate": 0.5}, "min_rate must be a number from 1 on, got 0.5"),
        ({"min_rate": float("nan")}, "min_rate must be a number from 1 on, got nan"),
        ({"feedback": "yes"}, "feedback must be True or False, got 'yes'"),
    ],
)
def test_senseless_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(RuleError, match=message):
        LowRank(**arguments)  # type: ignore[arg-type]
