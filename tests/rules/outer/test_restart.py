# SPDX-License-Identifier: Apache-2.0
"""Restarts of the outer momentum, by hand and against torch's SGD whose state is dropped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.errors import RuleError
from paceline.rules.outer import BlockMomentum, Nesterov
from paceline.rules.outer.base import Coefficients
from tests.rules.outer.test_block_momentum import F64
from tests.update.engine.test_blocks import climb


@pytest.mark.parametrize("nesterov", [True, False])
def test_four_blocks_by_hand(nesterov: bool) -> None:
    """eta = 1/2, zeta = 1, R = 2, d = 1, tau = 4: Delta is 1, 3/2, 1, 3/2."""
    outer = BlockMomentum(0.5, 1.0, nesterov=nesterov, restart=2)
    anchor, out, delta = (torch.zeros(1, dtype=F64) for _ in range(3))
    starts, models, rhos, aheads, rho = [], [], [], [], 0.0
    for block in range(1, 5):
        c = Coefficients(0.5, 1.0, 0.5, 0.5, block=block)
        rho, ahead = outer.equivalent_minibatches(rho, 4.0, c)
        starts.append(float(outer.step(anchor, torch.ones(1, dtype=F64), {"delta": delta}, c, out)))
        models.append(float(anchor))
        rhos.append(rho)
        aheads.append(ahead)
        assert float(outer.origin(anchor, {"delta": delta}, c, out)) == starts[-1]
    assert models == [1.0, 2.5, 3.5, 5.0]
    assert rhos == [4.0, 0.0, 4.0, 0.0]
    assert starts == ([1.5, 2.5, 4.0, 5.0] if nesterov else models)
    assert aheads == ([2.0, 0.0, 2.0, 0.0] if nesterov else [0.0, 2.0, 0.0, 2.0])


@pytest.mark.parametrize("restart", [1, 2, 3, 5])
@pytest.mark.parametrize(("outer", "nesterov"), [(Nesterov, True), (BlockMomentum, False)])
def test_it_is_torchs_sgd_whose_state_is_dropped(outer: Any, nesterov: bool, restart: int) -> None:
    step = outer(0.9, 0.7, restart=restart) if nesterov else outer(0.9, 0.7, nesterov=False, restart=restart)
    anchor, out = torch.randn(50, dtype=F64), torch.empty(50, dtype=F64)
    parameter = nn.Parameter(anchor.clone())
    reference = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=nesterov)
    state = {name: torch.zeros(50, dtype=F64) for name in step.tensors}
    for block in range(1, 13):
        d = torch.randn(50, dtype=F64)
        parameter.grad = -d
        reference.step()
        start = step.step(anchor, d, state, Coefficients(0.9, 0.7, 0.9, 0.9, block=block), out)
        assert (start - parameter).abs().max() < 1e-12
        if block % restart == 0:
            reference.state.clear()


@pytest.mark.parametrize("more", ["", ", overlap=1", ", fragments=2"])
def test_the_engine_restarts(more: str) -> None:
    """Both workers move by 1 a step, in blocks of 2: the model by 2, 3, 2, 3. Of two fragments the first has blocks of
    1, 2, 2, 2 and 1 steps, and moves by 1, 2.5, 2, 3 and 1."""
    ends = [9.5, 10.0] if "fragments" in more else [10.0]
    rule = f"bmuf(period=2, momentum=0.5, lr=1, nesterov=False, restart=2{more})"
    for _, end in climb(rule, [1.0, 1.0], [8, 8], count=len(ends)):
        assert end == ends


@pytest.mark.parametrize("restart", [-1, 1.5, True, "2", None])
def test_a_bad_number_of_blocks(restart: Any) -> None:
    for name in ("bmuf", "diloco", "auto"):
        with pytest.raises(RuleError, match="restart must be a whole number of blocks"):
            paceline.RECIPES[name].build(restart=restart)
