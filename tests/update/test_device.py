# SPDX-License-Identifier: Apache-2.0
"""What makes the host wait for an accelerator, counted on one that is made of host memory (:mod:`tests.device`)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.communication.virtual import VirtualTransport
from paceline.core.flat import all_finite, fragments
from paceline.rules.codec.select import largest
from tests.device import NAME, WAITS, Device, DeviceTensor
from tests.helpers import attached, follow

BLOCKS = [
    "averaging(period=4)",
    "bmuf(period=4)",
    "bmuf_adam(period=4)",
    "diloco(period=4)",
    "diloco(period=4, overlap=2)",
    "diloco(period=4, overlap=2, codec='int8')",
    "diloco(period=4, codec='top_k(ratio=0.1)')",
    "diloco(period=4, codec='one_bit')",
    "streaming_diloco(period=4, fragments=1, overlap=2)",
    "easgd(period=4)",
]
EVERY_STEP = ["sync", "sync(reproducible=True)", "one_bit", "power", "top_k", "one_bit_adam(warmup=3)"]


def program(rule: str, device: str, steps: int = 13, spoil: int | None = None) -> Any:
    """What two virtual workers return: the waits of each step, the parameters, and the contributions left out."""

    def work() -> Any:
        torch.manual_seed(0)
        layers = (nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
        model = nn.Sequential(*layers).to(device)
        kind: Any = torch.optim.Adam if "adam" in rule else torch.optim.SGD
        optimizer = kind(model.parameters(), lr=0.01)
        waits = []
        with paceline.attach(model, optimizer, rule) as run:
            generator = torch.Generator().manual_seed(run.world.rank)
            for step in range(steps):
                x = torch.randn(16, 8, generator=generator)
                if step == spoil and run.world.rank == 1:
                    x[0] = math.nan
                x = x.to(device)
                optimizer.zero_grad()
                with WAITS.counting() as found:
                    model(x).square().mean().backward()
                    optimizer.step()
                waits.append(found)
            state = {name: host(tensor) for name, tensor in model.state_dict().items()}
        return waits, state

    def entered() -> Any:
        with Device():
            return work()

    return paceline.simulate(entered if device == NAME else work, 2)


def host(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.host if isinstance(tensor, DeviceTensor) else tensor).clone()


@pytest.mark.parametrize("rule", BLOCKS)
def test_inside_a_block_nothing_waits_for_the_device(rule: str) -> None:
    """Steps 4, 8 and 12 exchange; a server's answer, which lands a step later, is written from host memory."""
    for waits, _ in program(rule, NAME):
        lands = (0,) if "easgd" in rule else ()
        inside = [found for step, found in enumerate(waits) if step % 4 != 3 and step % 4 not in lands]
        assert not any(inside), inside
        assert all(0 < len(waits[step]) <= 6 for step in (3, 7, 11)), waits


@pytest.mark.parametrize("rule", EVERY_STEP)
def test_a_backward_pass_is_waited_for_once_at_its_end(rule: str) -> None:
    for waits, _ in program(rule, NAME):
        assert [len(found) for found in waits] == [1] * len(waits), waits


@pytest.mark.parametrize("rule", [*BLOCKS, *EVERY_STEP])
def test_the_device_gives_what_the_host_gives(rule: str) -> None:
    for (_, ours), (_, theirs) in zip(program(rule, NAME), program(rule, "cpu"), strict=True):
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", [*BLOCKS[:-1], *EVERY_STEP])
def test_a_back_end_that_takes_host_memory_gives_the_same(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gloo does with CUDA tensors: contributions are copied to the host, and their sum to the device."""
    wanted = program(rule, "cpu")
    monkeypatch.setattr(VirtualTransport, "wire_device", lambda self, device: torch.device("cpu"))
    for (_, ours), (_, theirs) in zip(program(rule, NAME), wanted, strict=True):
        for name, tensor in ours.items():
            torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", ["sync", "one_bit", "top_k", "bmuf(period=4)"])
def test_a_contribution_that_is_not_finite_is_left_out_on_the_device_too(rule: str) -> None:
    (_, ours), (_, theirs) = program(rule, NAME, spoil=5)[0], program(rule, "cpu", spoil=5)[0]
    for name, tensor in ours.items():
        assert tensor.isfinite().all(), name
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-5, atol=1e-6)


def test_gradients_whose_squares_overflow_are_finite_on_the_device() -> None:
    def work() -> Any:
        with Device():
            with attached(nn.Linear(4, 2, bias=False).to(NAME), "sync", lr=1e-35) as (_, model, optimizer):
                for _ in range(3):
                    follow(optimizer, model(torch.ones(3, 4).to(NAME)).sum() * 1e30)
            return host(model.weight)

    torch.manual_seed(0)
    for weight in paceline.simulate(work, 2):
        assert weight.isfinite().all()


def test_the_largest_are_the_same_on_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    for n, k in [(1, 1), (7, 3), (64, 64), (1000, 17), (40_000, 400)]:
        for x in (torch.randn(n, generator=generator), torch.randint(-3, 4, (n,), generator=generator).float()):
            with Device(), WAITS.counting() as waits:
                found = largest(x.to(NAME), k)
            assert [one for one in waits if "select.py" in one] == []
            assert torch.equal(host(found), largest(x.clone(), k))


def test_all_finite_reads_one_value_of_a_device() -> None:
    with Device():
        named = [(str(n), torch.full((3,), float(n)).to(NAME)) for n in range(4)]
        parts = [part for pair in named for part in fragments("parameters", [pair])]
        with WAITS.counting() as waits:
            assert all_finite(parts)
        assert len(waits) == 1
        named[2][1].fill_(math.inf)
        assert not all_finite(parts)
        named[2][1].fill_(3e38)  # their sum overflows
        assert all_finite(parts)
