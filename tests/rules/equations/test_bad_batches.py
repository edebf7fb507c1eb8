# SPDX-License-Identifier: Apache-2.0
"""A batch with nan must not stay in BatchNorm's running statistics, on whichever workers it was."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from paceline import NonFiniteError
from tests.helpers import attached, make_net, rank, same_bits, simulate, state_of
from tests.tables import dealt

RULES = ["sync", "one_bit(warmup=2)", "sync(reproducible=True)", "averaging(period=2)", "bmuf(period=2, overlap=1)"]
RULES += ["averaging(period=2, warmup=4)", "streaming_diloco(period=4, fragments=2, overlap=1)"]
FREE = ["asgd(overlap=0)", "ssp(staleness=2)", "easgd(period=2)", "asgd(period=2)"]
WHO: list[tuple[Any, ...]] = [((0, 1, 2),), ((1,),)]


def program(rule: str, who: tuple[int, ...], guarded: bool, steps: int = 16) -> dict[str, Any]:
    """Batch 3 is nan on the workers `who`; a `guarded` program skips it, after the forward pass has seen it."""
    with attached(make_net(norm=True), rule, timeout_s=20) as (_, model, optimizer):
        torch.manual_seed(rank())
        failed = 0
        for step in range(steps):
            optimizer.zero_grad()
            x = torch.randn(8, 6)
            if step == 3 and rank() in who:
                x[0, 0] = torch.nan
            loss = model(x).square().mean()
            if guarded and not bool(torch.isfinite(loss)):
                continue
            try:
                loss.backward()
                optimizer.step()
            except NonFiniteError:
                failed += 1
    return {"model": state_of(model), "failed": failed}


def check(outs: list[dict[str, Any]]) -> None:
    for out in outs:
        assert all(bool(torch.isfinite(value).all()) for value in out["model"].values())
        assert same_bits(out["model"], outs[0]["model"])
    mean = outs[0]["model"]["1.running_mean"]
    assert float(mean.abs().max()) > 0  # statistics of good batches are there


@pytest.mark.parametrize(("rule", "who"), dealt([(rule,) for rule in RULES + FREE], WHO))
def test_a_nan_batch_does_not_stay(rule: str, who: tuple[int, ...]) -> None:
    check(simulate(partial(program, rule, who, guarded=False), 3))


@pytest.mark.parametrize(("rule", "who"), dealt([(rule,) for rule in RULES[3:5] + FREE], WHO))
def test_nor_one_whose_step_the_program_skips(rule: str, who: tuple[int, ...]) -> None:
    check(simulate(partial(program, rule, who, guarded=True), 3))
