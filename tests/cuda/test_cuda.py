# SPDX-License-Identifier: Apache-2.0
"""The same promises on a GPU; skipped where there is none. Virtual workers share the one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.core.optimizer_state import step_count

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RECIPES = [
    "sync",
    "averaging(period=3)",
    "bmuf(period=3)",
    "bmuf(period=3, reproducible=True)",
    "bmuf(period=3, warmup=4)",
    "diloco(period=3)",
]


def net(device: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    # No bias before BatchNorm: its gradient is rounding noise, which Adam would blow up to full steps.
    layers = (nn.Linear(8, 32, bias=False), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4))
    return nn.Sequential(*layers).to(device, dtype)


def data(rank: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(14, 16, 8, generator=generator)
    return x.to(device), x[..., :4].argmax(-1).to(device)


Make = Callable[[Any], torch.optim.Optimizer]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def train(rule: str, device: str, make: Make = sgd, dtype: torch.dtype = torch.float32, **settings: Any) -> list[Any]:
    """Four virtual workers; each returns (global state, parameters, losses)."""

    def program() -> Any:
        model = net(device, dtype)
        optimizer = make(model.parameters())
        losses = []
        with paceline.attach(model, optimizer, rule, **settings) as run:
            xs, ys = data(run.world.rank, device)
            for x, y in zip(xs, ys, strict=True):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            state = run.global_state()
        return state, [p.detach().clone() for p in model.parameters()], losses

    return paceline.simulate(program, 4)


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("rule", RECIPES)
@pytest.mark.parametrize("outer_state", ["device", "host"])
def test_workers_end_with_the_same_bits(rule: str, outer_state: str) -> None:
    results = train(rule, "cuda", outer_state=outer_state)
    for _, parameters, losses in results[1:]:
        assert same(parameters, results[0][1])
        assert sum(losses[-3:]) < sum(losses[:3])


def test_state_on_the_host_gives_what_state_on_the_device_gives() -> None:
    a, b = (train("bmuf(period=3)", "cuda", outer_state=where)[0] for where in ("device", "host"))
    for x, y in zip(a[1], b[1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_bf16_model_has_fp32_outer_state() -> None:
    results = train("bmuf(period=3)", "cuda", dtype=torch.bfloat16)
    for _, parameters, _ in results[1:]:
        assert same(parameters, results[0][1])
        assert parameters[0].dtype == torch.bfloat16


@pytest.mark.parametrize("form", [{"foreach": True}, {"fused": True}, {"capturable": True}, {"foreach": False}])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_every_form_of_adam_takes_a_real_valued_counter(kind: Any, form: dict[str, bool]) -> None:
    results = train("bmuf_adam(period=3)", "cuda", lambda p: kind(p, lr=0.01, **form))
    for _, parameters, _ in results[1:]:
        assert same(parameters, results[0][1])
    plain = train("bmuf_adam(period=3)", "cuda", lambda p: kind(p, lr=0.01, foreach=False))
    for x, y in zip(results[0][1], plain[0][1], strict=True):
        torch.testing.assert_close(x, y, rtol=2e-3, atol=2e-4)


def test_one_worker_is_the_users_program() -> None:
    def program(attached: bool) -> list[Tensor]:
        model = net("cuda")
        optimizer = sgd(model.parameters())
        run = paceline.attach(model, optimizer, "bmuf") if attached else None
        xs, ys = data(0, "cuda")
        for x, y in zip(xs, ys, strict=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if run is not None:
            run.close()
        return [p.detach().clone() for p in model.parameters()]

    assert same(program(True), program(False))


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=3)", "bmuf(period=3, warmup=4)"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_that_skips_leaves_all_workers_alike(rule: str, fused: bool) -> None:
    def program() -> Any:
        model = net("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**60)  # far too high: the first steps overflow
        with paceline.attach(model, optimizer, rule, scaler=scaler) as run:
            xs, ys = data(run.world.rank, "cuda")
            for x, y in zip(xs, ys, strict=True):
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = nn.functional.cross_entropy(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                if rule == "sync" and run.world.rank == 0 and step_count(optimizer, list(model.parameters())) > 0:
                    assert run.minibatches > 0
            done = run.minibatches
        return [p.detach().clone() for p in model.parameters()], done, scaler.get_scale()

    results = paceline.simulate(program, 4)
    for parameters, _, scale in results[1:]:
        assert same(parameters, results[0][0])
        if rule == "sync":
            assert scale == results[0][2]
    assert all(torch.isfinite(p).all() for p in results[0][0])


def test_a_model_on_the_gpu_resumes_with_the_same_bits(tmp_path: Any) -> None:
    def program(stop: int | None, resume: bool) -> Any:
        model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.3), nn.Linear(32, 4))
        torch.manual_seed(1)
        model = copy.deepcopy(model).to("cuda")
        for p in model.parameters():
            nn.init.normal_(p, std=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        run = paceline.attach(model, optimizer, "bmuf_adam(period=3)")
        if resume:
            run.resume(tmp_path / "step")
        xs, ys = data(run.world.rank, "cuda")
        for number in range(run.minibatches, 14):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(xs[number]), ys[number]).backward()
            optimizer.step()
            if number + 1 == stop:
                run.save(tmp_path / "step")
        run.close()
        return [p.detach().clone() for p in model.parameters()]

    whole = paceline.simulate(lambda: program(7, False), 2)
    again = paceline.simulate(lambda: program(None, True), 2)
    assert same(whole[0], again[0]) and same(whole[1], again[1])
