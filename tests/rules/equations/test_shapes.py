# SPDX-License-Identifier: Apache-2.0
"""Every recipe on a model whose tensors are of every kind: without elements, of no dimension, complex, mixed, tied."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.rules.recipes import RECIPES
from tests.helpers import attached, distance, follow, rank, same_bits, simulate

RULES = {
    "auto": ["auto(first=2, longest=4)"],
    "sync": ["sync", "sync(codec='int8')", "sync(reproducible=True)"],
    "one_bit": ["one_bit(warmup=2)"],
    "power": ["power(warmup=2, rank=1)"],
    "top_k": ["top_k(warmup=1)"],
    "one_bit_adam": ["one_bit_adam(warmup=2)"],
    "averaging": ["averaging(period=2, warmup=3)", "averaging(period=3, local_state='average')"],
    "bmuf": ["bmuf(period=4, fragments=4, overlap=3)", "bmuf(period=3, codec='low_rank(rank=1)')"],
    "bmuf_adam": ["bmuf_adam(period=3, overlap=2, fragments=3)"],
    "diloco": ["diloco(period=2, ema=0.5)"],
    "streaming_diloco": ["streaming_diloco(period=4)"],
    "asgd": ["asgd", "asgd(period=2)"],
    "ssp": ["ssp", "ssp(period=2)"],
    "easgd": ["easgd(period=2)"],
}
ADAM_ONLY, SGD_ONLY = ("one_bit_adam", "bmuf_adam"), ("momentum_tuned", "adadelay")
CASES = [(name, text) for name in RECIPES for text in RULES.get(name, [name])]


class Odd(nn.Module):
    """A small network, and parameters and buffers of every kind beside it."""

    def __init__(self, imaginary: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)
        self.none = nn.Parameter(torch.zeros(0, 3))
        self.none64 = nn.Parameter(torch.zeros(0, dtype=torch.float64) if imaginary else torch.zeros(0, 2))
        self.none16 = nn.Parameter(torch.zeros(2, 0, dtype=torch.float16))  # the only one of its kind
        self.single = nn.Parameter(torch.randn(()))
        self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
        self.small = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.last = nn.Parameter(torch.randn(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.tied = self.first.weight
        if imaginary:
            self.complex = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64))
            self.complex0 = nn.Parameter(torch.randn((), dtype=torch.complex64))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("mean", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        self.mean.mul_(0.9).add_(x.mean().detach(), alpha=0.1)
        loss = self.second(torch.tanh(self.first(x))).square().mean()
        for name, p in self.named_parameters():
            if "." not in name:
                loss = loss + (torch.view_as_real(p) if p.is_complex() else p).float().square().sum() * x.mean().abs()
        return loss


def program(rule: str, kind: str, imaginary: bool, steps: tuple[int, ...]) -> dict[str, Tensor]:
    model = Odd(imaginary)
    make: Any = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    }[kind]
    with attached(model, rule, make, timeout_s=20) as (run, _, optimizer):
        torch.manual_seed(rank())
        for _ in range(steps[rank()]):
            follow(optimizer, model(torch.randn(4, 6)))
    exported = run.model_for_export().state_dict()
    return {name: tensor.detach().clone() for name, tensor in exported.items()}


def check(rule: str, kind: str, imaginary: bool) -> None:
    one, other = simulate(partial(program, rule, kind, imaginary, (7, 9)), 2)
    assert same_bits(one, other)
    start = Odd(imaginary).state_dict()
    for name, tensor in one.items():
        assert tensor.dtype == start[name].dtype and tensor.shape == start[name].shape
        values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        assert bool(torch.isfinite(values).all())
        if tensor.numel() and tensor.is_floating_point() and name != "bytes":
            assert not torch.equal(tensor, start[name])  # it was trained


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_every_recipe(name: str, rule: str) -> None:
    imaginary = name not in ("asgd", "ssp", "staleness_aware", "dc_asgd", "easgd", *SGD_ONLY)
    for kind in ("momentum", "adam"):
        if (kind == "momentum" and name in ADAM_ONLY) or (kind == "adam" and name in SGD_ONLY):
            continue
        check(rule, "sgd" if name == "adadelay" else kind, imaginary)


@pytest.mark.parametrize("rule", ["asgd", "easgd(period=2)", "ssp", "dc_asgd"])
def test_asynchronous_rules_refuse_complex_parameters(rule: str) -> None:
    with pytest.raises(paceline.UnsupportedError, match="complex"):
        check(rule, "sgd", imaginary=True)


def test_averaging_at_every_step_is_the_mean_gradient_for_every_kind() -> None:
    outs = [simulate(partial(program, rule, "sgd", True, (6, 6)), 2)[0] for rule in ("averaging(period=1)", "sync")]
    small = {name: tensor for name, tensor in outs[0].items() if tensor.dtype != torch.bfloat16 and tensor.numel()}
    real = [{n: torch.view_as_real(o[n]) if o[n].is_complex() else o[n] for n in small} for o in outs]
    assert distance(*real) < 1e-5


def test_as_many_fragments_as_there_are_parameters_with_elements() -> None:
    def body(fragments: int) -> None:
        model = nn.Module()
        model.none = nn.Parameter(torch.zeros(0, 3))
        model.single = nn.Parameter(torch.randn(()))
        model.complex = nn.Parameter(torch.randn(2, dtype=torch.complex64))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with paceline.attach(model, optimizer, "streaming_diloco(period=4)", fragments=fragments, timeout_s=20):
            for _ in range(9):
                optimizer.zero_grad()
                (model.single.square() + torch.view_as_real(model.complex).square().sum() + model.none.sum()).backward()
                optimizer.step()

    simulate(lambda: body(2), 2)
    with pytest.raises(paceline.UnsupportedError, match="2 trainable parameters"):
        simulate(lambda: body(3), 2)
