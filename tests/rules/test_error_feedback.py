# SPDX-License-Identifier: Apache-2.0
"""Rules that send few bits of the gradient, or of Adam's moment, in whole runs: against slow references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import paceline
from tests.helpers import State, attached, rank, same_bits, simulate, state_of

F64 = torch.float64
N = 3
Array = np.ndarray[Any, Any]


class Numbers(nn.Module):
    """Two vectors; gradients are given by hand."""

    def __init__(self, dtype: torch.dtype = F64) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        self.a = nn.Parameter(torch.randn(20, generator=g, dtype=F64).to(dtype))
        self.b = nn.Parameter(torch.randn(30, generator=g, dtype=F64).to(dtype))


def gradient(step: int, worker: int, size: int, at: Array) -> Array:
    """Pulls towards a worker's own aim, with noise."""
    g = np.random.default_rng(1000 * step + 10 * worker + size)
    return (at - worker) * np.linspace(0.1, 2.0, size) + g.normal(size=size)


# -- 1-bit Adam --------------------------------------------------------------------------------------------------------
def sign_of(v: Array) -> Array:
    """A vector is one column: its mean magnitude, with the signs; in float32 as on the wire."""
    scale = np.float32(np.abs(v.astype(np.float32)).astype(np.float64).sum() / v.size)
    return np.where(v >= 0, float(scale), -float(scale))


def reference(
    steps: int,
    warmup: int,
    *,
    lr: Callable[[int], float],
    signs: bool,
    betas: tuple[float, float] = (0.8, 0.95),
    eps: float = 1e-8,
    decay: float = 0.0,
    decoupled: bool = False,
    maximize: bool = False,
) -> list[Array]:
    """arXiv 2102.02888 for vectors of 20 and 30, worker by worker and number by number."""
    b1, b2 = betas
    finals = []
    for x in (p.detach().numpy().copy() for p in (Numbers().a, Numbers().b)):
        m, v = np.zeros_like(x), np.zeros_like(x)
        residuals, owner = [np.zeros_like(x) for _ in range(N)], np.zeros_like(x)
        for k in range(1, steps + 1):
            g = [gradient(k, w, x.size, x) * (-1 if maximize else 1) for w in range(N)]
            if decay and not decoupled:
                g = [one + decay * x for one in g]
            if k <= warmup:
                m = b1 * m + (1 - b1) * sum(g) / N
                v = b2 * v + (1 - b2) * (sum(g) / N) ** 2
            else:
                moments = [b1 * m + (1 - b1) * one for one in g]
                if signs:
                    given = [one + r for one, r in zip(moments, residuals, strict=True)]
                    sent = [sign_of(one) for one in given]
                    residuals = [one - s for one, s in zip(given, sent, strict=True)]
                    total = sum(sent) + owner
                    owner = total - sign_of(total)
                    m = sign_of(total) / N
                else:
                    m = sum(moments) / N
            step = m / (1 - b1**k) / (np.sqrt(v / (1 - b2 ** min(k, warmup))) + eps)
            x = x - lr(k) * (step + (decay * x if decoupled else 0))
        finals.append(x)
    return finals


def one_bit_adam(
    steps: int,
    warmup: int,
    codec: str,
    make: Callable[[Any], torch.optim.Optimizer],
    scheduler: bool = False,
    **at: Any,
) -> State:
    """The same with paceline; `at` may save, stop and resume."""
    model = Numbers()
    optimizer = make(model.parameters())
    fall = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97 if scheduler else 1.0)
    with paceline.attach(model, optimizer, f"one_bit_adam(warmup={warmup}, codec='{codec}')", timeout_s=20) as run:
        if "resume" in at:
            run.resume(at["resume"], fall=fall)
        for k in range(run.minibatches + 1, steps + 1):
            optimizer.zero_grad()
            made = {}
            for p in model.parameters():
                p.grad = torch.from_numpy(gradient(k, rank(), p.numel(), p.detach().numpy()))
                made[p] = p.grad
            optimizer.step()
            if k > warmup:
                assert all(p.grad is made[p] for p in model.parameters()), "the gradient came back after the step"
            fall.step()
            if k == at.get("save_at"):
                run.save(at["save_to"], fall=fall)
                if at.get("stop"):
                    run.abandon()
                    return {}
    return state_of(model)


KINDS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95)), {}),
    "adam_decay": (lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1), {"decay": 0.1}),
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=0.02, betas=(0.8, 0.95), weight_decay=0.1),
        {"decay": 0.1, "decoupled": True},
    ),
    "maximize": (lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), maximize=True), {"maximize": True}),
    "eps": (lambda p: torch.optim.Adam(p, lr=0.02, betas=(0.8, 0.95), eps=0.1), {"eps": 0.1}),
}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("codec", ["dense", "sign"])
@pytest.mark.parametrize("scheduler", [False, True], ids=["constant", "schedule"])
def test_one_bit_adam_is_its_equation(kind: str, codec: str, scheduler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.rules.codec.sign.SHORTEST", 1)  # a vector is a column
    make, more = KINDS[kind]
    want = reference(14, 5, lr=lambda k: 0.02 * (0.97 ** (k - 1) if scheduler else 1), signs=codec == "sign", **more)
    outs = simulate(lambda: one_bit_adam(14, 5, codec, make, scheduler), N)
    for out in outs:
        assert same_bits(out, outs[0])
        for name, x in zip("ab", want, strict=True):
            # the wire's scales have 24 bits
            np.testing.assert_allclose(out[name].numpy(), x, rtol=0, atol=1e-12 if codec == "dense" else 2e-5)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), "SGD"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), "RMSprop"),
        (lambda p: torch.optim.Adam(p, amsgrad=True), "amsgrad"),
        (lambda p: torch.optim.Adamax(p), "Adamax"),
    ],
)
def test_one_bit_adam_refuses_other_optimizers(make: Any, said: str) -> None:
    def program() -> None:
        model = Numbers()
        paceline.attach(model, make(model.parameters()), "one_bit_adam", timeout_s=20)

    with pytest.raises(paceline.UnsupportedError, match=said):
        simulate(program, 2)


def test_one_bit_adam_with_a_scaler() -> None:
    """The moment takes gradients as the step sees them, unscaled; or such a scaler is refused at attach."""

    def program(scaled: bool) -> State:
        torch.manual_seed(0)
        model = nn.Linear(6, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1000, enabled=scaled)
        more = {"scaler": scaler} if scaled else {}
        with paceline.attach(model, optimizer, "one_bit_adam(warmup=2, codec='dense')", timeout_s=20, **more):
            torch.manual_seed(rank())
            for _ in range(6):
                optimizer.zero_grad()
                scaler.scale(model(torch.randn(4, 6)).square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
        return state_of(model)

    want = simulate(lambda: program(False), N)[0]
    try:
        found = simulate(lambda: program(True), N)[0]
    except paceline.UnsupportedError as error:
        assert "scaler" in str(error).lower()
        return
    for name in want:
        torch.testing.assert_close(found[name], want[name], rtol=0, atol=1e-5)


# -- nothing is lost ---------------------------------------------------------------------------------------------------
def weights_of(parameter: Tensor) -> Tensor:
    """Something to multiply numbers with before they are added, for quantisers keep plain sums by themselves."""
    return torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()), dtype=F64)


def kept_by(run: paceline.Run, model: nn.Module) -> float:
    """What this worker still has to send, and what it still owes as an owner of stripes; weighted."""
    assert run._engine is not None
    update, parameters = run._engine.gradient_exchanges.updates[0], list(model.parameters())
    weights = torch.cat([weights_of(parameters[index]).view(-1) for index in update.buckets.order])
    total = 0.0
    for chunk in update.buckets.chunks:
        mine = weights[chunk.begin : chunk.end]
        if "residual" in chunk.state:
            total += float(chunk.state["residual"].double() @ mine)
        if "owner" in chunk.state:
            stripe = -(-mine.numel() // (N * 64)) * 64
            total += float(chunk.state["owner"].double() @ mine[rank() * stripe : (rank() + 1) * stripe])
    return total


def weighted(model: nn.Module) -> float:
    """The gradients, weighted and added."""
    return sum(float((p.grad.double() * weights_of(p)).sum()) for p in model.parameters() if p.grad is not None)


RULES = [
    "one_bit(warmup=2)",
    "one_bit(warmup=0)",
    "power(rank=1, warmup=2)",
    "power(rank=2, warmup=0)",
    "top_k(ratio=0.1, warmup=0)",
    "top_k(ratio=0.01, warmup=1)",
    "sync(codec='int8')",
    "sync(codec='e3m0')",
    "sync(codec='sign')",
]


def telescopes(
    rule: str,
    missing: Callable[[int, int], bool],
    monkeypatch: pytest.MonkeyPatch,
    chunks: bool,
    nan: tuple[int, int] | None = None,
) -> None:
    """N x the means that were applied + all residuals = all gradients; weighted sums over everything, to rounding.

    `missing(step, worker)` says where the second matrix has no gradient; `nan` is a step and the worker left out.
    """
    if chunks:
        monkeypatch.setattr("paceline.update.engine.blocks.outer_state.SMALL_ELEMENTS", 64)
        monkeypatch.setattr("paceline.update.engine.blocks.outer_state.SMALL_CODED", 64)
        monkeypatch.setattr("paceline.communication.virtual.transport.VirtualTransport.coarse", 1)

    def program() -> tuple[float, float, float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 30), nn.Linear(30, 20), nn.Linear(20, 40))
        with attached(model, rule, lr=0.0, timeout_s=20) as (run, _, optimizer):
            g = torch.Generator().manual_seed(rank())
            given = applied = 0.0
            for step in range(9):
                optimizer.zero_grad()
                for k, p in enumerate(model.parameters()):
                    if not (k == 2 and missing(step, rank())):
                        p.grad = torch.randn(p.shape, generator=g) + 0.3
                if (step, rank()) == nan:
                    model[0].weight.grad.fill_(float("nan"))
                else:
                    given += weighted(model)
                optimizer.step()
                applied += (N - 1 if nan and step == nan[0] else N) * weighted(model)
            left = kept_by(run, model)
        return given, applied, left

    outs = simulate(program, N)
    given, left = sum(o[0] for o in outs), sum(o[2] for o in outs)
    assert abs(left) > 0.1
    assert outs[0][1] + left == pytest.approx(given, abs=5e-3)


@pytest.mark.parametrize("chunks", [False, True], ids=["one_chunk", "many_chunks"])
@pytest.mark.parametrize("rule", RULES)
def test_applied_plus_residual_is_the_input(rule: str, chunks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    telescopes(rule, lambda step, worker: False, monkeypatch, chunks)


@pytest.mark.parametrize("rule", ["one_bit(warmup=0)", "power(rank=1, warmup=0)", "top_k(ratio=0.1, warmup=0)"])
@pytest.mark.parametrize("who", ["one", "all"])
def test_nothing_is_lost_where_a_gradient_is_missing(rule: str, who: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a residual sends for a parameter that has no gradient now must be applied, or kept."""
    telescopes(rule, lambda step, worker: step in (3, 4, 8) and (who == "all" or worker == 1), monkeypatch, False)


@pytest.mark.parametrize("rule", ["one_bit(warmup=0)", "top_k(ratio=0.1, warmup=0)", "power(rank=1, warmup=0)"])
def test_an_exchange_that_is_sent_twice_changes_no_residual_twice(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A nan makes everybody send again: without that worker nothing of the first sending may stay."""
    telescopes(rule, lambda step, worker: False, monkeypatch, chunks=False, nan=(3, 1))


def test_momentum_before_the_choice_is_dgcs_equation() -> None:
    """u = m u + g, v = v + u, the k largest of v are sent and u = v = 0 there; one vector, worker by worker."""
    m, ratio, steps, size = 0.7, 0.2, 8, 20

    def given(step: int, worker: int) -> Array:
        return np.random.default_rng(100 * step + worker).normal(size=size).astype(np.float32)

    def program() -> list[Array]:
        model = nn.Module()
        model.w = nn.Parameter(torch.zeros(size))
        with attached(model, "top_k", lr=1.0, ratio=ratio, momentum=m, warmup=0, timeout_s=20) as (_, _, optimizer):
            seen = []
            for step in range(steps):
                model.w.grad = torch.from_numpy(given(step, rank()))
                optimizer.step()
                seen.append(model.w.grad.numpy().copy())
        return seen

    found = simulate(program, N)[0]
    u, v = [np.zeros(size, np.float32) for _ in range(N)], [np.zeros(size, np.float32) for _ in range(N)]
    for step in range(steps):
        total = np.zeros(size, np.float32)
        for w in range(N):
            u[w] = np.float32(m) * u[w] + given(step, w)
            v[w] = v[w] + u[w]
            chosen = np.argsort(-np.abs(v[w]), kind="stable")[: int(np.ceil(ratio * size))]
            total[chosen] += v[w][chosen]
            u[w][chosen] = v[w][chosen] = 0
        np.testing.assert_allclose(found[step], total / N, rtol=0, atol=1e-5)
