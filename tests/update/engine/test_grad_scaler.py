# SPDX-License-Identifier: Apache-2.0
"""Mixed precision: a step that the GradScaler skips is no step, and with gradients all workers skip together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from tests.helpers import adam, attached, descend, make_net, momentum_sgd, rank, same_bits, simulate, state_of

F32 = torch.float32


def program(
    rule: str,
    *,
    overflow: Callable[[int], bool],
    known: bool = True,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum_sgd,
    unscale: bool = False,
    steps: int = 8,
) -> dict[str, Any]:
    """A loop with a scaler; `overflow(step)` says whether this worker's gradient overflows."""
    model = make_net()
    opt = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1000)
    with paceline.attach(model, opt, rule, **({"scaler": scaler} if known else {})) as run:
        torch.manual_seed(rank())
        counted, scales = [], []
        for step in range(steps):
            opt.zero_grad()
            loss = scaler.scale(model(torch.randn(4, 6)).square().mean())
            (loss * float("inf") if overflow(step) else loss).backward()
            if unscale:
                scaler.unscale_(opt)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            counted.append(run.minibatches)
            scales.append(scaler.get_scale())
    return {"model": state_of(model), "counted": counted, "scales": scales, "own": "step" in scaler.__dict__}


def test_blocks_count_a_skipped_step_as_none() -> None:
    outs = simulate(partial(program, "averaging(period=3)", overflow=lambda step: rank() == 1 and step in (1, 2)), 2)
    assert outs[0]["counted"] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert outs[1]["counted"] == [1, 1, 1, 2, 3, 4, 5, 6]
    assert outs[1]["scales"][-1] == 2.0 and outs[0]["scales"][-1] == 8.0
    assert same_bits(outs[0]["model"], outs[1]["model"])


def test_with_a_scaler_the_result_is_that_without_one() -> None:
    """Scales are powers of two, so scaling is exact and the mean of scaled gradients is the scaled mean."""

    def plain() -> dict[str, torch.Tensor]:
        with attached(make_net(), "sync", momentum_sgd) as (_, model, opt):
            torch.manual_seed(rank())
            for _ in range(8):
                descend(model, opt, torch.randn(4, 6))
        return state_of(model)

    found = simulate(partial(program, "sync", overflow=lambda step: False), 2)[0]["model"]
    want = simulate(plain, 2)[0]
    assert max(float((found[k] - want[k]).abs().max()) for k in want) < 1e-6


@pytest.mark.parametrize("who", [(1,), (0, 1)])
def test_an_unknown_scaler_sees_the_mean(who: tuple[int, ...]) -> None:
    """Gradients are the workers' mean when backward returns, so a scaler unknown to the run decides alike."""
    known, unknown = (
        simulate(partial(program, "sync", overflow=lambda step: rank() in who and step == 2, known=told), 2)
        for told in (True, False)
    )
    for one, other in zip(known, unknown, strict=True):
        assert one["counted"] == other["counted"] and one["scales"] == other["scales"]
        assert same_bits(one["model"], other["model"])
        assert same_bits(one["model"], known[0]["model"])


def test_an_unknown_scaler_in_blocks_is_fine() -> None:
    outs = simulate(partial(program, "bmuf(period=2)", overflow=lambda step: step == rank(), known=False), 2)
    assert same_bits(outs[0]["model"], outs[1]["model"])


def test_the_warm_up_needs_the_scaler_and_gives_it_back() -> None:
    outs = simulate(partial(program, "averaging(period=2, warmup=3)", overflow=lambda step: step == 1), 2)
    assert outs[0]["counted"] == outs[1]["counted"] == [1, 1, 2, 3, 4, 5, 6, 7]
    assert not outs[0]["own"]
    assert same_bits(outs[0]["model"], outs[1]["model"])


@pytest.mark.parametrize("rule", ["bmuf_adam(period=2)", "sync"])
def test_fused_adam_skips_inside_its_step(rule: str) -> None:
    def fused(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01, fused=True)

    outs = simulate(partial(program, rule, overflow=lambda step: step == 2, optimizer=fused), 2)
    assert outs[0]["counted"] == outs[1]["counted"] == [1, 2, 2, 3, 4, 5, 6, 7]
    assert same_bits(outs[0]["model"], outs[1]["model"])


def test_bf16_autocast_in_blocks() -> None:
    def body() -> dict[str, torch.Tensor]:
        with attached(make_net(), "bmuf_adam", adam, period=2) as (_, model, opt):
            torch.manual_seed(rank())
            for _ in range(5):
                opt.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = model(torch.randn(4, 6)).float().square().mean()
                loss.backward()
                opt.step()
        return state_of(model)

    one, other = simulate(body, 2)
    assert same_bits(one, other) and all(v.dtype == F32 for v in one.values())
