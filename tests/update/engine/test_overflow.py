# SPDX-License-Identifier: Apache-2.0
"""Under a GradScaler an overflow on one worker is an overflow on all: the scale goes as with one process."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline import NonFiniteError, UnsupportedError
from tests.helpers import attached, distance, make_net, momentum_sgd, rank, same_bits, sgd, simulate, state_of

LARGEST = 65504.0  # of float16
BATCHES, SAMPLES = 40, 4


class Narrow(torch.autograd.Function):
    """Passes the loss on; the gradient is infinite where it would not fit 16 bits."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, size: float) -> Tensor:
        ctx.size = size
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (scale,) = grads
        return (scale * float("inf") if float(scale) * ctx.size > LARGEST else scale), None


def batches(worker: int) -> list[Tensor]:
    g = torch.Generator().manual_seed(worker)
    return [torch.randn(SAMPLES, 6, generator=g) for _ in range(BATCHES)]


def size_of(worker: int, batch: int) -> float:
    """How large the gradients of a batch are: those of worker 1 need a scale that is 2^6 smaller."""
    return 32.0 if worker == 1 and batch % 3 else 0.5


def program(
    rule: str,
    *,
    workers: int = 2,
    alone: bool = False,
    known: bool = True,
    by_hand: bool = False,
    passes: int = 1,
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum_sgd,
) -> dict[str, Any]:
    """A loop with a scaler on this worker's batches; `alone`, on those of all workers."""
    model = make_net()
    opt = optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
    run = None if alone else paceline.attach(model, opt, rule, timeout_s=20, **({"scaler": scaler} if known else {}))
    data = [batches(worker) for worker in range(workers)] if alone else [batches(rank())]
    scales = []
    for batch in range(0, BATCHES, passes):
        opt.zero_grad()
        for n in range(batch, batch + passes):
            x = torch.cat([of[n] for of in data])
            size = max(size_of(w, n) for w in range(workers)) if alone else size_of(rank(), n)
            loss = scaler.scale(Narrow.apply(model(x).square().mean() / passes, size))
            if by_hand:
                for p, g in zip(model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True):
                    p.grad = g if p.grad is None else p.grad + g
            else:
                loss.backward()
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
    made = run.minibatches if run is not None else 0
    if run is not None:
        run.close()
    return {"model": state_of(model), "scales": scales, "made": made}


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("known", "by_hand"), [(True, False), (True, True), (False, False)])
def test_the_scale_goes_as_with_one_process(known: bool, by_hand: bool, passes: int) -> None:
    (want,) = simulate(partial(program, "", alone=True, passes=passes), 1)
    found = simulate(partial(program, "sync", known=known, by_hand=by_hand, passes=passes), 2)
    for one in found:
        assert one["scales"] == want["scales"]
        assert distance(one["model"], want["model"]) < 1e-5
        assert same_bits(one["model"], found[0]["model"])


RULES = [
    "sync(codec='int8')",
    "sync(reproducible=True)",
    "one_bit(warmup=2)",
    "power(warmup=2, rank=1)",
    "top_k(warmup=2, ratio=0.3)",
    "averaging(period=4, warmup=60)",
    "ssp(staleness=0)",
]


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("rule", RULES)
def test_under_every_rule_that_exchanges_gradients(rule: str, known: bool) -> None:
    (want,) = simulate(partial(program, "", alone=True, workers=3), 1)
    found = simulate(partial(program, rule, workers=3, known=known), 3)
    for one in found:
        assert one["scales"] == want["scales"]
        assert one["made"] == found[0]["made"] < BATCHES
        assert same_bits(one["model"], found[0]["model"])
        assert all(bool(torch.isfinite(value).all()) for value in one["model"].values())


def test_where_the_processes_of_a_host_are_one_worker() -> None:
    """Each host goes as one process with the batches of its processes."""

    def host(workers: tuple[int, ...]) -> list[float]:
        scaler_of = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=5)
        weight = nn.Parameter(torch.zeros(1))
        opt = torch.optim.SGD([weight], lr=0.0)
        scales = []
        for n in range(BATCHES):
            opt.zero_grad()
            scaler_of.scale(Narrow.apply(weight.sum(), max(size_of(w, n) for w in workers))).backward()
            scaler_of.step(opt)
            scaler_of.update()
            scales.append(scaler_of.get_scale())
        return scales

    torch.manual_seed(5)
    within = partial(program, "averaging(period=4, within='host')", workers=4)
    found = list(paceline.simulate(within, 4, hosts=["a", "a", "b", "b"]))
    for number, one in enumerate(found):
        assert one["scales"] == host((0, 1) if number < 2 else (2, 3))
        assert same_bits(one["model"], found[0]["model"])


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize(
    "rule", ["one_bit(warmup=1)", "top_k(ratio=0.3)", "top_k(ratio=0.2, momentum=0.5)", "power(warmup=1, rank=1)"]
)
def test_what_a_codec_kept_follows_the_scale(rule: str, known: bool) -> None:
    """Scales are powers of two: with and without a scaler that grows, the same bits."""

    def body(scaled: bool) -> dict[str, Tensor]:
        model = make_net()
        opt = sgd(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=1.0, growth_interval=3, enabled=scaled)
        with paceline.attach(model, opt, rule, timeout_s=20, **({"scaler": scaler} if known else {})):
            for x in batches(rank())[:20]:
                opt.zero_grad()
                scaler.scale(model(x).square().mean()).backward()
                scaler.step(opt)
                scaler.update()
        return state_of(model)

    plain, grown = simulate(lambda: body(False), 2)[0], simulate(lambda: body(True), 2)[0]
    if rule.startswith("power"):  # its factors come from a decomposition
        assert distance(plain, grown) < 1e-5
    else:
        assert same_bits(plain, grown)


def spoiled_step(scaler: torch.amp.GradScaler | None, through: bool, spoiled: int = 1) -> None:
    """Two steps; the gradient of worker 1 in one of them is infinite."""
    model = make_net()
    with attached(model, "sync", timeout_s=20, **{"scaler": scaler} if scaler is not None else {}) as (run, _, opt):
        for step in range(2):
            opt.zero_grad()
            loss = model(torch.ones(4, 6)).square().mean()
            loss = loss if scaler is None else scaler.scale(loss)
            (loss * float("inf") if rank() == 1 and step == spoiled else loss).backward()
            if through and scaler is not None:
                scaler.step(opt)
                scaler.update()
            else:
                opt.step()
        assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
        assert run.minibatches == 2


def test_a_disabled_scaler_is_none() -> None:
    simulate(lambda: spoiled_step(torch.amp.GradScaler("cpu", enabled=False), through=True), 2)


def test_without_a_scaler_the_worker_is_left_out_as_ever() -> None:
    gc.collect()
    simulate(lambda: spoiled_step(None, through=False), 2)


def test_a_step_that_the_scaler_does_not_make_is_refused() -> None:
    with pytest.raises(NonFiniteError, match=r"rank 1 .*GradScaler"):
        simulate(lambda: spoiled_step(torch.amp.GradScaler("cpu"), through=False, spoiled=0), 2)


@pytest.mark.parametrize("kind", ["subclass", "after a resume"])
def test_a_scaler_that_is_not_known_is_refused_where_gradients_are_set_by_hand(kind: str, tmp_path: Any) -> None:
    class Own(torch.amp.GradScaler):
        pass

    def body() -> None:
        model = make_net()
        opt = sgd(model.parameters())
        run = paceline.attach(model, opt, "sync", timeout_s=20)
        scaler = Own("cpu") if kind == "subclass" else torch.amp.GradScaler("cpu")
        for step in range(2):
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            scaler.scale(torch.zeros(1))
            if step == 0 and kind != "subclass":
                opt.step()
                run.save(tmp_path / "saved")
                run.resume(tmp_path / "saved")
                continue
            scaler.step(opt)

    with pytest.raises(UnsupportedError, match="Give the scaler to paceline"):
        simulate(body, 2)


def test_one_bit_adam_refuses_a_scaler_that_is_not_known_at_once() -> None:
    made = []

    def body() -> None:
        model = make_net()
        opt = torch.optim.Adam(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        paceline.attach(model, opt, "one_bit_adam(warmup=3)", timeout_s=20)
        for step in range(6):
            made.append(step)
            opt.zero_grad()
            scaler.scale(model(torch.ones(4, 6)).square().mean()).backward()
            scaler.step(opt)
            scaler.update()

    with pytest.raises(UnsupportedError, match="scaler"):
        simulate(body, 2)
    assert set(made) == {0}
