# SPDX-License-Identifier: Apache-2.0
"""Blocks over time: overlapped exchanges, and a model in fragments."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from tests.helpers import adam, attached, descend, follow, momentum_sgd, rank, same_bits, simulate, train

F64 = torch.float64


class Scalars(nn.Module):
    """Numbers that are parameters of their own, at 0."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.zeros(1, dtype=F64)) for _ in range(count))

    def values(self) -> list[float]:
        return [float(p.detach()) for p in self.p]


Watch = Callable[[int, Scalars, Any], None]


def climb(
    rule: str, speeds: list[float], steps: list[int], *, count: int = 1, after: Watch | None = None
) -> list[tuple[list[list[float]], list[float]]]:
    """Worker r moves every number by speeds[r] in each of steps[r] steps: ([its numbers after each], at the end)."""

    def program() -> tuple[list[list[float]], list[float]]:
        with attached(Scalars(count), rule, lr=1.0, timeout_s=20) as (run, model, optimizer):
            seen = []
            for step in range(1, steps[rank()] + 1):
                for p in model.parameters():
                    p.grad = torch.full_like(p, -speeds[rank()])
                if after is not None:
                    after(step, model, run)
                optimizer.step()
                seen.append(model.values())
        return seen, model.values()

    return simulate(program, len(speeds))


# -- by hand -----------------------------------------------------------------------------------------------------------
def test_three_blocks_by_hand_when_the_progress_is_kept() -> None:
    found = climb("averaging(period=2, overlap=1)", [1.0, 3.0], [7, 7])
    # sent after 2, 4, 6: deltas 2 and 6, mean 4; landed after 3, 5, 7: start 4, 8, 12 and one step of progress
    assert [v[0] for v in found[0][0]] == [1, 2, 4 + 1, 6, 8 + 1, 10, 12 + 1]
    assert [v[0] for v in found[1][0]] == [3, 6, 4 + 3, 10, 8 + 3, 14, 12 + 3]
    assert [end for _, end in found] == [[14.0], [14.0]]


@pytest.mark.parametrize("period", [3, 4, 5])
@pytest.mark.parametrize("fragments", [1, 2, 3])
def test_every_minibatch_counts_once(period: int, fragments: int) -> None:
    """Constant gradients: any overlap ends where one worker with the mean gradient ends."""
    for overlap in range(period + 1):
        rule = f"averaging(period={period}, fragments={fragments}, overlap={overlap})"
        for steps in (11, 12):
            for _, end in climb(rule, [1.0, 3.0, 8.0], [steps] * 3, count=4):
                assert end == pytest.approx([4.0 * steps] * 4, abs=1e-12)


def test_mixing_by_hand() -> None:
    """theta_i = alpha theta_i + (1 - alpha) theta, as in arXiv 2501.18512; the next delta is measured from theta."""
    rule = "streaming_diloco(period=2, overlap=1, fragments=1, mixing=0.25, momentum=0.0, lr=1.0, codec='dense')"
    found = climb(rule, [1.0, 3.0], [5, 5])
    # after 3: global 4, locals 3 and 9;   after 4: deltas 0.75 and 4.25;   after 5: global 6.5, locals 5.75 and 11.25
    first = [1, 2, 0.25 * 3 + 3, 4.75, 0.25 * 5.75 + 0.75 * 6.5]
    second = [3, 6, 0.25 * 9 + 3, 8.25, 0.25 * 11.25 + 0.75 * 6.5]
    assert [v[0] for v in found[0][0]] == pytest.approx(first, abs=1e-14)
    assert [v[0] for v in found[1][0]] == pytest.approx(second, abs=1e-14)


@pytest.mark.parametrize("delay", [0, 1, 2, 3])
def test_mixing_of_nesterov_with_momentum_by_hand(delay: int) -> None:
    """Outer steps of the publication's equations, with the delta that the worker had when it was sent."""
    mu, nu, alpha = 0.5, 0.8, 0.5
    rule = f"streaming_diloco(period=3, overlap={delay}, fragments=1, momentum={mu}, lr={nu}, codec='dense')"
    theta, b, sent = 0.0, 0.0, [0.0, 0.0]
    locals_, want = [0.0, 0.0], []
    for step in range(1, 12):
        locals_ = [x + c for x, c in zip(locals_, (1.0, 3.0), strict=True)]
        if step % 3 == 0 and delay == 0:
            sent = list(locals_)
        if step >= 3 and (step - delay) % 3 == 0 and step > delay:
            g = sum(theta - x for x in sent) / 2
            b = mu * b + g
            theta = theta - nu * (g + mu * b)
            locals_ = [alpha * x + (1 - alpha) * theta for x in locals_]
        if step % 3 == 0:
            sent = list(locals_)
        want.append(list(locals_))
    found = climb(rule, [1.0, 3.0], [11, 11])
    for worker in range(2):
        assert [v[0] for v in found[worker][0]] == pytest.approx([row[worker] for row in want], abs=1e-12)


@pytest.mark.parametrize(
    "kind",
    [
        "averaging(period=3, overlap={d}, local_state='average')",
        "bmuf_adam(period=3, overlap={d}, momentum=0.0, lr=1.0)",
    ],
)
@pytest.mark.parametrize("overlap", [1, 2, 3])
def test_adams_moments_under_overlap(kind: str, overlap: int) -> None:
    """now + b^made (start - then): what Adam's recursion would have made of the other start, for the same gradients."""
    b1, b2, lr, period, steps = 0.5, 0.9, 0.05, 3, 10
    aims = [torch.tensor([1.0, -2.0, 4.0], dtype=F64), torch.tensor([3.0, 1.0, -1.0], dtype=F64)]

    def program() -> list[tuple[Tensor, Tensor, Tensor, float]]:
        model = nn.Linear(3, 1, bias=False).double()
        with torch.no_grad():
            model.weight.zero_()
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(b1, b2))
        with paceline.attach(model, optimizer, kind.format(d=overlap), timeout_s=20):
            seen = []
            for _ in range(steps):
                follow(optimizer, (model.weight - aims[rank()]).square().sum())
                s = optimizer.state[model.weight]
                parts = (model.weight.detach()[0], s["exp_avg"][0], s["exp_avg_sq"][0])
                seen.append((*(t.clone() for t in parts), float(s["step"])))
        return seen

    found = simulate(program, 2)
    p, m, v = ([torch.zeros(3, dtype=F64) for _ in aims] for _ in range(3))
    then: list[list[Tensor]] = []
    for step in range(1, steps + 1):
        for k, aim in enumerate(aims):
            g = 2 * (p[k] - aim)
            m[k] = b1 * m[k] + (1 - b1) * g
            v[k] = b2 * v[k] + (1 - b2) * g * g
            p[k] = p[k] - lr * (m[k] / (1 - b1**step)) / ((v[k] / (1 - b2**step)).sqrt() + 1e-8)
        if step > overlap and (step - overlap) % period == 0:
            for now, old, decay in zip((p, m, v), then, (1.0, b1**overlap, b2**overlap), strict=True):
                mean = (old[0] + old[1]) / 2
                for k in range(2):
                    now[k] = now[k] + decay * (mean - old[k])
            v = [x.clamp(min=0) for x in v]
        if step % period == 0:
            then = [list(p), list(m), list(v)]
        for k in range(2):
            for ours, theirs in zip(found[k][step - 1][:3], (p[k], m[k], v[k]), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)
            assert found[k][step - 1][3] == step


# -- fragments ---------------------------------------------------------------------------------------------------------
def test_which_fragment_is_exchanged_when() -> None:
    """Fragment f of 4 after (f + 1) 8/4 steps of each block; its numbers, and no others, become the mean."""
    found = climb("averaging(period=8, fragments=4)", [1.0, 3.0], [16, 16], count=4)
    one, other = (seen for seen, _ in found)
    for step in range(1, 17):
        equal = [a == b for a, b in zip(one[step - 1], other[step - 1], strict=True)]
        fragment = step // 2 % 4 - 1 if step % 2 == 0 else None
        assert equal == [fragment is not None and f == fragment % 4 for f in range(4)], step


@pytest.mark.parametrize("overlap", [0, 2])
def test_no_exchange_is_larger_than_its_share(overlap: int) -> None:
    """Eight equal layers in four fragments: the peak is a quarter of the whole, and a header."""

    def peaks(fragments: int) -> list[int]:
        def program() -> list[int]:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(8)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            with paceline.attach(model, optimizer, "bmuf", period=8, fragments=fragments, overlap=overlap) as run:
                sent, before = [], run.bytes_sent
                for _ in range(18):
                    descend(model, optimizer, torch.randn(2, 16))
                    sent.append(run.bytes_sent - before)
                    before = run.bytes_sent
            return sent

        return simulate(program, 2)[0]

    header = 88
    whole, parts = peaks(1), peaks(4)
    assert max(parts) == (max(whole) - header) // 4 + header
    assert sum(n > 0 for n in parts) == 9 and sum(n > 0 for n in whole) == 2


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("bmuf(period=3)", "bmuf(period=3, overlap=0, fragments=1)"),
        ("diloco(period=3)", "streaming_diloco(period=3, overlap=0, fragments=1, mixing=None, codec='dense')"),
        ("bmuf(period=1)", "bmuf(period=1, fragments=1)"),
    ],
)
def test_without_overlap_and_fragments_nothing_is_different(one: str, other: str) -> None:
    choices: dict[str, Any] = {"optimizer": adam, "norm": True, "dropout": 0.2, "samples": 50}
    for a, b in zip(train(one, 3, **choices), train(other, 3, **choices), strict=True):
        assert same_bits(a.model, b.model)
        assert a.losses == b.losses


def test_fragments_of_averaging_at_every_step_are_averaging_at_every_step() -> None:
    """Element by element nothing knows of fragments: the same period and moment of exchange, the same bits."""
    found = climb("averaging(period=4, fragments=2)", [1.0, 3.0], [9, 9], count=2)
    whole = climb("averaging(period=4)", [1.0, 3.0], [9, 9], count=2)
    assert [v[1] for v in found[0][0]] == [v[1] for v in whole[0][0]]  # fragment 1 ends with the period


def test_more_fragments_than_parameters_is_refused() -> None:
    with pytest.raises(paceline.UnsupportedError, match=r"2 trainable parameters .* 3 fragments"):
        climb("averaging(period=4, fragments=3)", [1.0, 3.0], [1, 1], count=2)


# -- inf and nan under overlap -----------------------------------------------------------------------------------------
def test_a_worker_that_is_not_finite_is_left_out_and_goes_on_from_the_start() -> None:
    def poison(step: int, model: Scalars, run: Any) -> None:
        if step == 4 and run.world.rank == 1:
            model.p[0].grad = torch.full_like(model.p[0], float("nan"))

    found = climb("averaging(period=2, overlap=1)", [1.0, 3.0, 5.0], [6, 6, 6], after=poison)
    one, bad, other = ([v[0] for v in seen] for seen, _ in found)
    # landed after 3: start 6.   sent after 4: 2, nothing and 10, mean 6: start 12 lands after 5
    assert one == [1, 2, 6 + 1, 8, 12 + 1, 14]
    assert other == [5, 10, 6 + 5, 16, 12 + 5, 22]
    assert bad == [3, 6, 6 + 3, 6, 12 + 3, 18]  # back to its block's start, from which one step of 3 is progress
    assert [end for _, end in found] == [[18.0]] * 3


def test_nothing_finite_leaves_the_global_model_and_training_goes_on() -> None:
    caught = []

    def program() -> list[float]:
        with attached(Scalars(1), "averaging(period=2, overlap=1)", lr=1.0, timeout_s=20) as (run, model, optimizer):
            seen = []
            for step in range(1, 9):
                speed = float("nan") if step == 4 else 1.0 + rank()
                model.p[0].grad = torch.full_like(model.p[0], -speed)
                try:
                    optimizer.step()
                except paceline.NonFiniteError:
                    caught.append((rank(), step))
                seen.append(float(run.global_state()["p.0"]))
        return [*seen, *model.values()]

    outs = simulate(program, 2)
    assert sorted(caught) == [(0, 5), (1, 5)]
    assert outs[0] == outs[1]
    assert outs[0][2:5] == [3.0, 3.0, 3.0]  # step 6 begins the next exchange, and the global model has it at once
    assert outs[0][5] > 3.0 and all(x == x for x in outs[0])


@pytest.mark.parametrize(
    "rule", ["averaging(period=4)", "averaging(period=4, fragments=2)", "bmuf(period=4, fragments=2, overlap=1)"]
)
def test_a_nan_that_passes_is_left_out_once(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """A worker that was restarted in one fragment must not send the nan of its other fragments again."""

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        with attached(model, rule, lr=0.1, timeout_s=20) as (_, _, optimizer):
            for step in range(24):
                optimizer.zero_grad()
                nan = step == 5 and rank() == 1
                (model(torch.randn(2, 3)).square().mean() * (float("nan") if nan else 1)).backward()
                optimizer.step()

    with caplog.at_level(logging.WARNING, logger="paceline"):
        simulate(program, 3)
    left_out = {text for r in caplog.records if "was rejected" in (text := r.getMessage())}
    assert 1 <= len(left_out) <= 2


# -- uneven data -------------------------------------------------------------------------------------------------------
def merged(speeds: list[float], steps: list[int], period: int, fragments: int, fragment: int) -> float:
    """Law 9 by hand: every exchange adds the mean of c n, weighted by the minibatches n that it stands for."""

    def ends(number: int) -> int:
        block, f = divmod(number, fragments)
        return block * period + (f + 1) * period // fragments

    total, number, done = 0.0, fragment, [0] * len(steps)
    while done != steps:
        made = []
        for k, last in enumerate(steps):
            until = ends(number) if ends(number) <= last else last
            made.append(until - done[k])
            done[k] = until
        weight = sum(made)
        total += sum(n * n * c for n, c in zip(made, speeds, strict=True)) / weight
        number += fragments
    return total


@pytest.mark.parametrize(
    ("steps", "fragments", "overlap"),
    [
        *(([4, 2, 1], *cut) for cut in [(1, 0), (1, 4), (2, 3), (3, 4)]),
        *(([12, 5, 9], *cut) for cut in [(1, 2), (2, 0), (4, 1)]),
        *(([3, 14, 0], *cut) for cut in [(1, 0), (2, 3)]),
        *(([9, 8, 10], *cut) for cut in [(1, 4), (4, 1)]),
        *(([1, 1, 13], *cut) for cut in [(1, 2), (3, 4)]),
    ],
    ids=str,
)
def test_all_work_is_merged_when_workers_end_at_different_steps(steps: list[int], fragments: int, overlap: int) -> None:
    speeds = [1.0, 3.0, 8.0]
    rule = f"averaging(period=4, fragments={fragments}, overlap={overlap})"
    found = climb(rule, speeds, steps, count=4)
    assert all(end == found[0][1] for _, end in found)
    want = [merged(speeds, steps, 4, fragments, f % fragments) for f in range(4)]
    assert found[0][1] == pytest.approx(want, abs=1e-12)


# -- stop and resume while an exchange is under way --------------------------------------------------------------------

FULL: dict[str, Any] = {"dropout": 0.3, "norm": True, "schedule": True, "samples": 60, "epochs": 3}


@pytest.mark.parametrize(
    ("rule", "optimizer"),
    [
        ("bmuf(period=4, overlap=3, fragments=2)", momentum_sgd),
        ("bmuf_adam(period=4, overlap=4, reproducible=True)", adam),
        ("streaming_diloco(period=4, overlap=2, fragments=3, warmup=2)", adam),
        ("averaging(period=4, overlap=3, codec='one_bit', local_state='average')", momentum_sgd),
        ("averaging(period=4, overlap=1, codec='low_rank(rank=1)')", momentum_sgd),
    ],
)
def test_law_3_at_every_offset_of_a_period(rule: str, optimizer: Any, tmp_path: Path) -> None:
    whole = train(rule, 3, optimizer=optimizer, **FULL)
    for at in (5, 6, 7, 8):
        path = tmp_path / str(at)
        saved = train(rule, 3, optimizer=optimizer, save_at=at, save_to=path, **FULL)
        for one, other in zip(saved, whole, strict=True):
            assert same_bits(one.model, other.model), "saving changed the trajectory"
        resumed = train(rule, 3, optimizer=optimizer, resume=path, **FULL)
        for one, other in zip(resumed, whole, strict=True):
            assert one.losses == other.losses[at:]
            assert same_bits(one.model, other.model)
            assert same_bits(one.exported, other.exported)


# -- one worker, buffers -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "rule",
    [
        "bmuf_adam(period=4, overlap=4, fragments=2)",
        "bmuf_adam(period=4, overlap=3, codec='int8')",
        "averaging(period=4, overlap=2, local_state='average')",
        "streaming_diloco(period=4, overlap=3, fragments=2)",
    ],
)
def test_whether_the_background_is_early_or_late_does_not_show(rule: str) -> None:
    """`global_state` waits for what is under way; schedules change betas and rates meanwhile."""

    def program(look: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        with attached(model, rule, torch.optim.AdamW, lr=0.01, timeout_s=20) as (run, _, optimizer):
            cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40)
            torch.manual_seed(rank())
            for step in range(18):
                descend(model, optimizer, torch.randn(5, 4))
                if look and step % 2:
                    run.global_state()
                cycle.step()
        return [p.detach().clone() for p in model.parameters()]

    early, late = simulate(partial(program, True), 3), simulate(partial(program, False), 3)
    for one, other in zip(early, late, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
