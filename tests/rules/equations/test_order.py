# SPDX-License-Identifier: Apache-2.0
"""Under every block rule all workers start the same operations in the same order, wherever each of them ends."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers import attached, descend, rank, same_bits, simulate

CODECS = ["dense", "e3m0", "one_bit", "low_rank(rank=1)", "top_k(ratio=0.3)", "int8"]


def program(rule: str, steps: Sequence[int], each: Callable[[Any, int], None] | None = None) -> dict[str, Tensor]:
    """`steps[rank]` steps, and the model that the worker ends with; `each(run, step)` is called after every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    with attached(model, rule, lr=0.1, timeout_s=20) as (run, _, optimizer):
        torch.manual_seed(rank())
        for step in range(steps[rank()]):
            descend(model, optimizer, torch.randn(4, 4))
            if each is not None:
                each(run, step)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def check(rule: str, steps: Sequence[int], each: Callable[[Any, int], None] | None = None) -> None:
    first, *others = simulate(partial(program, rule, steps, each), len(steps))
    assert all(same_bits(first, other) for other in others), (rule, steps)


def drawn(dice: random.Random) -> tuple[str, list[int]]:
    """A rule with fragments, overlap and codec, and how many steps each worker makes."""
    period = dice.randint(1, 6)
    fragments, overlap = dice.randint(1, min(4, period)), dice.randint(0, period)
    name = dice.choice(["averaging", "bmuf", "diloco", "streaming_diloco", "auto"])
    given: list[str] = [f"first={period}, longest={period}" if name == "auto" else f"period={period}"]
    given += [f"fragments={fragments}, overlap={overlap}, codec='{dice.choice(CODECS)}'"]
    given += [text for text in ("reproducible=True", f"warmup={dice.randint(1, 5)}") if dice.random() < 0.3]
    return f"{name}({', '.join(given)})", [dice.randint(0, 14) for _ in range(dice.randint(2, 5))]


@pytest.mark.parametrize("seed", range(12))
def test_drawn_rules(seed: int) -> None:
    check(*drawn(random.Random(seed)))


@pytest.mark.slow
def test_many_drawn_rules() -> None:
    for seed in range(100, 500):
        check(*drawn(random.Random(seed)))


def test_one_worker_looks_at_the_global_model_while_an_exchange_is_under_way() -> None:
    """And all workers meet besides, before its peers have its result."""

    def each(run: Any, step: int) -> None:
        if step % 3 == rank():
            run.global_state()
        run.messages.all_reduce(torch.tensor([float(step)])).wait()

    check("streaming_diloco(period=4, overlap=4)", (9, 9), each)


def test_tuning_requests_while_fragments_are_in_flight() -> None:
    def each(run: Any, step: int) -> None:
        if step == 5 and rank() == 1:
            run.tune(lr=0.05)

    for steps in itertools.permutations((7, 9, 12)):
        check("streaming_diloco(period=4, overlap=4)", steps, each)
