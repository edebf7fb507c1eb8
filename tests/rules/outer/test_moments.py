# SPDX-License-Identifier: Apache-2.0
"""Moment compensation against its closed form and against a constant gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from paceline.rules.outer.base import Coefficients
from paceline.rules.outer.block_momentum import BlockMomentum
from paceline.rules.outer.moments import block_decay, compensate

F64 = torch.float64


def two_steps(mean: Tensor, init: Tensor, b: float, tau: float, kv: float, square: bool = False) -> Tensor:
    return compensate(mean, init, decay=b**tau, ahead=b**kv, square=square, out=torch.empty_like(init))


@pytest.mark.parametrize(("b", "tau", "kv"), [(0.9, 8, 7.5), (0.999, 8, 496.0), (0.5, 3, 0.0), (0.95, 1, 2.25)])
def test_two_steps_are_the_closed_form(b: float, tau: float, kv: float) -> None:
    mean, init = torch.randn(200, dtype=F64), torch.randn(200, dtype=F64)
    found = two_steps(mean, init, b, tau, kv)
    closed = ((1 - b ** (tau + kv)) * mean - b**tau * (1 - b**kv) * init) / (1 - b**tau)
    assert (found - closed).abs().max() < 1e-12 * float(closed.abs().max().clamp(min=1))
    estimate = (mean - b**tau * init) / (1 - b**tau)
    ema = b ** (tau + kv) * init + (1 - b ** (tau + kv)) * estimate
    assert (found - ema).abs().max() < 1e-12 * float(ema.abs().max().clamp(min=1))


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("eta", "zeta"), [(15 / 16, 1.0), (0.6, 0.7), (0.5, 1.5)])
def test_under_a_constant_gradient_bias_correction_gives_the_gradient_at_every_block(
    nesterov: bool, eta: float, zeta: float
) -> None:
    g, tau, outer = 3.0, 8, BlockMomentum(eta, zeta, nesterov=nesterov)
    for b, value in ((0.9, g), (0.999, g * g)):
        init, k, rho = torch.zeros(1, dtype=F64), 0.0, 0.0
        for _ in range(12):
            mean = init.clone()
            for _ in range(tau):
                mean = b * mean + (1 - b) * value
            rho, kv = outer.equivalent_minibatches(rho, tau, Coefficients(eta, zeta, eta, eta))
            init = two_steps(mean, init, b, tau, kv)
            k += tau + kv
            assert float(init) / (1 - b**k) == pytest.approx(value, rel=1e-10)


def test_averaging_instead_of_compensating_misses_it() -> None:
    """The test above must be able to fail: without compensation the counter and the moment do not belong together."""
    b, tau, g = 0.9, 8, 3.0
    mean = torch.tensor([(1 - b**tau) * g], dtype=F64)
    rho, kv = BlockMomentum(gain="paper").equivalent_minibatches(0.0, tau, Coefficients(15 / 16, 1.0, 0.0, 15 / 16))
    assert rho == tau
    assert float(mean) / (1 - b ** (tau + kv)) != pytest.approx(g, rel=0.1)


def test_unequal_step_counts_have_a_decay_of_their_own() -> None:
    b, init, estimate = 0.9, 2.0, 5.0
    steps, weights = [8, 3, 0, 5], [8 / 8, 3 / 8, 0.0, 5 / 8]
    locals_ = [b**k * init + (1 - b**k) * estimate for k in steps]
    mean = sum(w * s for w, s in zip(weights, locals_, strict=True)) / sum(weights)
    decay = block_decay(b, steps, weights)
    assert (mean - decay * init) / (1 - decay) == pytest.approx(estimate, rel=1e-12)
    assert block_decay(b, [8, 8], [1.0, 1.0]) == b**8


def test_squares_never_fall_below_zero() -> None:
    init, mean = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 0.95])
    plain = two_steps(mean, init, 0.9, 1, 20.0)
    assert plain[0] < 0  # the estimate from the mean is negative
    clamped = two_steps(mean, init, 0.9, 1, 20.0, square=True)
    assert clamped[0] > 0
    assert clamped[1] == plain[1]
