# SPDX-License-Identifier: Apache-2.0
"""All workers start from rank 0's whole model: what is frozen, outside of the optimizer, or never averaged included."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import MismatchError, UnsupportedError
from tests.helpers import attached, descend, make_net, rank, same_bits, sgd, simulate

RULES = ["sync", "averaging(period=2)", "bmuf(period=3, overlap=1)", "asgd", "easgd(period=2)", "ssp(staleness=1)"]


class Model(nn.Module):
    """Trains one layer of many things that differ with the seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.outside = nn.Linear(6, 6)
        self.trained = nn.Linear(6, 3)
        self.conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]
        self.single = nn.Parameter(torch.randn(()), requires_grad=False)
        self.codes = nn.Parameter(torch.randint(0, 255, (7,), dtype=torch.uint8), requires_grad=False)
        self.small = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
        self.register_buffer("mask", torch.rand(9) > 0.5)
        self.register_buffer("turns", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("bounds", torch.cat([torch.randn(3), torch.tensor([torch.inf])]))
        self.register_buffer("order", torch.randperm(16), persistent=False)
        self.register_buffer("empty", torch.randn(0, 3))
        self.register_buffer("rows", torch.randn(4, 6).t())
        self.register_buffer("sparse", torch.eye(3).mul(torch.randn(3)).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return self.trained(torch.tanh(self.outside(torch.tanh(self.frozen(x)))))


def contents(model: nn.Module) -> dict[str, Tensor]:
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: (t.to_dense() if t.is_sparse else t).detach().clone() for name, t in found.items()}


def program(rule: str) -> list[dict[str, Tensor]]:
    model = Model(rank())
    before = contents(model)
    optimizer = sgd(model.trained.parameters())
    with paceline.attach(model, optimizer, rule, timeout_s=20):
        start = contents(model)
        for _ in range(5):
            descend(model, optimizer, torch.randn(4, 6))
    return [before, start, contents(model)]


@pytest.mark.parametrize("rule", RULES)
def test_every_worker_has_the_whole_model_of_rank_0(rule: str) -> None:
    first, *others = simulate(partial(program, rule), 3)
    assert same_bits(first[0], first[1])  # rank 0 keeps its own
    for before, start, end in others:
        assert not same_bits(before, start)
        assert same_bits(start, first[1])
        assert same_bits(end, first[2])


def test_what_another_run_trains_is_left_alone() -> None:
    """Attaching a second part of a model does not end the block of the first, nor drop what a worker did in it."""

    def body(second: bool) -> dict[str, Tensor]:
        model = nn.ModuleDict({"a": make_net(seed=1), "b": make_net(seed=2)})
        one, other = sgd(model["a"].parameters()), sgd(model["b"].parameters())
        with paceline.attach(model, one, "averaging(period=4)", timeout_s=20):
            torch.manual_seed(rank())
            late: Any = None
            for step in range(8):
                if step == 2 and second:
                    late = paceline.attach(model, other, "averaging(period=2)", timeout_s=20)
                descend(model["a"], one, torch.randn(4, 6))
        if late is not None:
            late.close()
        return {name: p.detach().clone() for name, p in model["a"].named_parameters()}

    alone, beside = simulate(lambda: body(False), 2), simulate(lambda: body(True), 2)
    assert same_bits(alone[0], beside[0]) and same_bits(beside[0], beside[1])


def test_a_run_that_is_over_owns_nothing_any_more() -> None:
    def body() -> dict[str, Tensor]:
        with attached(make_net(), "sync", timeout_s=20) as (_, model, _):
            pass
        for p in model.parameters():
            p.data.add_(rank())
        model[0].requires_grad_(False)
        with paceline.attach(model, sgd(model[-1].parameters()), "sync", timeout_s=20):
            return contents(model)

    one, other = simulate(body, 2)
    assert same_bits(one, other)


def test_models_whose_frozen_parts_differ_are_refused() -> None:
    def body() -> None:
        model = nn.ModuleDict({"frozen": nn.Linear(4 + rank(), 2).requires_grad_(False), "trained": make_net()})
        paceline.attach(model, sgd(model["trained"].parameters()), "sync", timeout_s=20)

    with pytest.raises(MismatchError, match=r"frozen\.weight"):
        simulate(body, 2)


def test_a_buffer_without_memory_is_refused() -> None:
    model = make_net()
    model.register_buffer("late", torch.empty(3, device="meta"))
    with pytest.raises(UnsupportedError, match="late"):
        simulate(lambda: paceline.attach(model, sgd(model.parameters()), "sync"), 2)


@pytest.mark.parametrize("rule", RULES)
def test_a_parameter_that_is_unfrozen_later_is_refused(rule: str) -> None:
    def body() -> None:
        model = make_net()
        model[0].requires_grad_(False)
        optimizer = sgd(model.parameters())
        paceline.attach(model, optimizer, rule, timeout_s=20)
        for step in range(8):
            model[0].requires_grad_(step >= 3)
            descend(model, optimizer, torch.randn(4, 6))

    with pytest.raises(UnsupportedError, match="attach again"):
        simulate(body, 2)
