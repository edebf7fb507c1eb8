# SPDX-License-Identifier: Apache-2.0
"""The host waits for the GPU at the end of a block or backward pass, and nowhere else: torch reports every wait."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import paceline

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OURS = Path(paceline.__file__).parent
BLOCKS = [
    "averaging(period=4)",
    "bmuf(period=4)",
    "bmuf_adam(period=4)",
    "diloco(period=4)",
    "diloco(period=4, overlap=2)",
    "diloco(period=4, overlap=2, codec='int8')",
    "diloco(period=4, codec='top_k(ratio=0.1)')",
    "streaming_diloco(period=4, fragments=1, overlap=2)",
]
EVERY_STEP = ["sync", "one_bit(warmup=2)", "power", "top_k"]


def waits(rule: str, steps: int) -> int:
    """How often paceline made the host wait, in all of a run of two virtual workers."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            paceline.simulate(lambda: program(rule, steps), 2)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum(one.filename.startswith(str(OURS)) for one in found)


def program(rule: str, steps: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4)).cuda()
    optimizer = (torch.optim.Adam if "adam" in rule else torch.optim.SGD)(model.parameters(), lr=0.01)
    with paceline.attach(model, optimizer, rule):
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.randn(16, 8, device="cuda")).square().mean().backward()
            optimizer.step()


@pytest.mark.parametrize("rule", BLOCKS)
def test_steps_inside_a_block_wait_for_nothing(rule: str) -> None:
    """13 and 15 steps make the same exchanges: after 4, 8 and 12 steps, and at the end."""
    assert waits(rule, 15) == waits(rule, 13)


@pytest.mark.parametrize("rule", EVERY_STEP)
def test_a_backward_pass_is_waited_for_once(rule: str) -> None:
    assert waits(rule, 15) - waits(rule, 13) <= 2 * 2
