# SPDX-License-Identifier: Apache-2.0
"""Workers judge members by held-out loss: one that climbs is left out, honest ones are not, nothing else changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import paceline
from paceline.update.exchange.judging import FIRST
from tests.helpers import same_bits, simulate
from tests.processes.judged_programs import FEATURES, Training, touch

RULES = ["averaging(period=4)", "bmuf(period=4)", "bmuf_adam(period=4)", "diloco(period=4)"]


def left_out(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "left out of exchange" in r.getMessage()]


def watched(caplog: pytest.LogCaptureFixture, target: Callable[[], Any], workers: int = 4) -> list[Any]:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        return simulate(target, workers)


# -- a member that climbs ----------------------------------------------------------------------------------------------


def climbing(rule: str, **more: Any) -> Training:
    """Training that gains more in a block than the noise of one, for long enough."""
    rate = 0.0001 if "diloco" in rule else 0.0004
    return Training(rule, **{"steps": 480, "lr": rate, "batch": 32, "ascends": 1, **more})


@pytest.mark.parametrize("rule", RULES)
def test_a_member_that_climbs_is_left_out_and_named_and_norms_do_not_notice_it(
    rule: str, caplog: pytest.LogCaptureFixture
) -> None:
    honest, spoilt = (watched(caplog, climbing(rule, held_out=False, ascends=k))[0]["final"] for k in (-1, 1))
    assert not left_out(caplog) and spoilt > 1.1 * honest
    outs = watched(caplog, climbing(rule))
    said = left_out(caplog)
    assert said and all("rank 1 on" in line and "held-out" in line for line in said)
    assert any("with it and" in line and "of 3 other workers" in line for line in said)
    assert any("probably broken" in r.getMessage() for r in caplog.records)
    assert all(same_bits(out["model"], outs[0]["model"]) for out in outs)
    assert outs[0]["final"] < spoilt - 0.3 * (spoilt - honest)


def test_a_member_that_begins_to_climb_later_is_found_and_one_that_stops_is_taken_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rule = "averaging(period=4, local_state='reset')"
    training = climbing(rule, ascends=2, since=100, until=300, guard={"audit_every": 2})
    training.settings["log"] = tmp_path
    outs = watched(caplog, training)
    assert all(same_bits(out["model"], outs[0]["model"]) for out in outs)
    told = [json.loads(line) for line in (tmp_path / "rank-000.jsonl").read_text().splitlines()]
    told = [line for line in told if line["kind"] == "left_out"]
    assert {(line["rank_left_out"], line["judged"], line["finite"]) for line in told} == {(2, True, True)}
    exchanges = [line["exchange"] for line in told]
    assert min(exchanges) > 100 // 4 and len(exchanges) >= 10 and max(exchanges) <= 300 // 4 + 6
    assert exchanges == list(range(exchanges[0], exchanges[-1] + 1))  # once it is a suspect, until it passes
    assert [line["in_a_row"] for line in told] == list(range(1, len(told) + 1))


def test_all_logs_tell_the_same_losses(tmp_path: Path) -> None:
    simulate(climbing("averaging(period=4)", settings={"log": tmp_path}), 4)
    logs = [(tmp_path / f"rank-{rank:03d}.jsonl").read_text().splitlines() for rank in range(4)]
    whys = [[json.loads(line)["why"] for line in log if json.loads(line)["kind"] == "left_out"] for log in logs]
    assert whys[0] and all(why == whys[0] for why in whys)


def test_the_report_tells_why(tmp_path: Path) -> None:
    from paceline.observe import read_run
    from paceline.observe.reports.summary import summarize, warnings

    simulate(climbing("averaging(period=4)", settings={"log": tmp_path}), 4)
    run = read_run(tmp_path)
    assert summarize(run).left_out > 3
    text = " ".join(warnings(run))
    assert "held-out loss gets worse" in text and "far larger" not in text and "not finite" not in text


# -- honest members ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_honest_members_under_noise_are_not_left_out(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    """Two hundred exchanges, each judged, far into the noise of small batches; the bits are those without a guard."""
    training = Training(rule, steps=4 * 200, batch=2, lr=0.005)
    plain = [out["model"] for out in simulate(Training(rule, steps=4 * 200, batch=2, lr=0.005, held_out=False), 4)]
    training.guard["audit_every"] = 1
    outs = watched(caplog, training)
    assert not left_out(caplog)
    assert all(same_bits(out["model"], model) for out, model in zip(outs, plain, strict=True))
    assert sum(len(out["calls"]) for out in outs) == 200 * 3 * 3  # the judged one evaluates nothing


@pytest.mark.parametrize("rule", [*RULES, "bmuf(period=3, reproducible=True, warmup=5, ema=0.5)", "auto(probe=0)"])
def test_whatever_the_function_does_the_bits_are_those_without_a_guard(rule: str) -> None:
    """With BatchNorm, dropout and the generators behind it."""
    plain, guarded, touched = (
        simulate(Training(rule, norm=True, held_out=held_out, touches=touches), 3)
        for held_out, touches in ((False, False), (True, False), (True, True))
    )
    for other in (guarded, touched):
        assert all(out["calls"] for out in other)
        for out, was in zip(other, plain, strict=True):
            assert same_bits(out["model"], was["model"]) and torch.equal(out["random"], was["random"])


def test_gradients_modes_and_buffer_objects_are_put_back() -> None:
    seen = []

    def program() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1))
        model[1].eval()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def held_out() -> float:
            assert all(p.grad is None for p in model.parameters()) and not torch.is_grad_enabled()
            touch(model)
            return 1.0

        guard = paceline.Guard(held_out=held_out)
        run = paceline.attach(model, optimizer, "averaging(period=1)", guard=guard, timeout_s=20)
        for _ in range(3):
            model(torch.randn(8, FEATURES)).sum().backward()
            held = [(p.grad, p.grad.clone()) for p in model.parameters() if p.grad is not None]
            buffers = dict(model.named_buffers())
            optimizer.step()
            for p, (grad, was) in zip(model.parameters(), held, strict=True):
                assert p.grad is grad and torch.equal(grad, was)
            assert all(buffer is buffers[name] for name, buffer in model.named_buffers())
            assert [module.training for module in model] == [True, False, True, True] and model.training
            optimizer.zero_grad()
        run.close()
        seen.append(len(held))

    simulate(program, 3)
    assert seen == [6] * 3


def test_the_candidates_are_the_means_with_and_without_the_judged_one() -> None:
    """By hand: worker r moves the weight by r + 1 in each exchange, from 0."""
    seen: list[tuple[int, int, float]] = []

    def program() -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

        def held_out() -> float:
            seen.append((run.blocks, run.world.rank, float(model.weight.detach())))
            return 1.0

        guard = paceline.Guard(held_out=held_out)
        run = paceline.attach(model, optimizer, "averaging(period=1)", guard=guard, timeout_s=20)
        for _ in range(4):
            model.weight.grad = torch.full((1, 1), -(run.world.rank + 1.0))
            optimizer.step()
        run.close()
        return float(model.weight.detach())

    assert simulate(program, 3) == [8.0] * 3
    for block in range(4):
        rows = {r: [w for b, rank, w in seen if (b, rank) == (block, r)] for r in range(3)}
        (judged,) = (r for r, row in rows.items() if not row)
        rest = sum(r + 1 for r in range(3) if r != judged) / 2
        assert all(row == [2.0 * block, 2.0 * block + rest, 2.0 * block + 2.0] for row in rows.values() if row)


@pytest.mark.parametrize("rule", ["averaging(period=4)", "bmuf_adam(period=4, reproducible=True)"])
def test_a_resumed_run_judges_as_the_one_that_went_on(rule: str, tmp_path: Path) -> None:
    """The judgements before, and who is a suspect, are in the checkpoint."""
    whole = simulate(climbing(rule, save_at=250, place=tmp_path / "kept", settings={"log": tmp_path / "log"}), 4)
    assert '"left_out"' in (tmp_path / "log" / "rank-000.jsonl").read_text()
    resumed = simulate(climbing(rule, place=tmp_path / "kept"), 4)
    for out, was in zip(resumed, whole, strict=True):
        assert same_bits(out["model"], was["model"])


def test_a_resume_on_more_workers_takes_the_judgements_along(tmp_path: Path) -> None:
    simulate(Training(save_at=100, place=tmp_path / "kept"), 4)
    outs = simulate(Training(ascends=4, since=100, steps=400, place=tmp_path / "kept"), 5)
    assert all(same_bits(out["model"], outs[0]["model"]) for out in outs)


def test_where_half_are_found_harmful_nobody_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A function that finds harm in all that is judged, from some place on."""

    def program() -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        numbers, calls = torch.Generator().manual_seed(7), list[int]()

        def held_out() -> float:
            calls.append(len(calls) % 3)  # the start, without it, with it
            harm = 1.0 if calls[-1] == 2 and run.blocks >= 24 else 0.0
            return 1.0 + harm + 1e-3 * torch.rand(1, generator=numbers).item()

        guard = paceline.Guard(held_out=held_out, audit_every=1)
        run = paceline.attach(model, optimizer, "averaging(period=1)", guard=guard, timeout_s=20)
        for _ in range(60):
            model.weight.grad = torch.full((1, 1), -1.0)
            optimizer.step()
        run.close()
        return float(model.weight.detach())

    assert watched(caplog, program) == [60.0] * 4
    assert any("begin anew" in r.getMessage() for r in caplog.records)
    exchanges = {int(line.split("exchange ")[1].split(":")[0]) for line in left_out(caplog)}
    assert exchanges and max(exchanges) < 40  # after that all count


def test_a_suspect_that_alone_has_work_left_is_judged_against_nothing_at_all(caplog: pytest.LogCaptureFixture) -> None:
    """By hand: three go down by 1 in each of 60 exchanges, and one goes up from 24 to 80; the loss is the weight."""

    def program() -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        numbers = torch.Generator().manual_seed(7)

        def held_out() -> float:
            return float(model.weight.detach()) + 1e-3 * torch.rand(1, generator=numbers).item()

        guard = paceline.Guard(held_out=held_out, audit_every=1)
        run = paceline.attach(model, optimizer, "averaging(period=1)", guard=guard, timeout_s=20)
        for step in range(80 if run.world.rank == 1 else 60):
            climbs = run.world.rank == 1 and step >= 24
            model.weight.grad = torch.full((1, 1), -1.0 if climbs else 1.0)
            optimizer.step()
        run.close()
        return float(model.weight.detach())

    outs = watched(caplog, program)
    exchanges = sorted({int(line.split("exchange ")[1].split(":")[0]) for line in left_out(caplog)})
    assert exchanges == list(range(exchanges[0], 81))
    climbed = exchanges[0] - 25  # exchanges in which it counted, each with a mean of -1/2
    assert 2 <= climbed < 20 and outs == [-60.0 + climbed / 2] * 4


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("auto", "name a block rule"),
        ("sync", "exchanges no blocks"),
        ("bmuf(overlap=2)", "leave overlap out"),
        ("bmuf(fragments=2)", "leave fragments out"),
        ("streaming_diloco(overlap=0)", "leave fragments out"),
        ("streaming_diloco(overlap=0, fragments=1, codec='dense')", "leave mixing out"),
        ("bmuf(codec='int8')", "codec='dense'"),
        ("bmuf(codec='bf16')", "codec='dense'"),
        ("bmuf(within='host')", "within"),
        ("bmuf(grow='auto')", "leave grow out"),
        ("asgd", "guard away"),
    ],
)
def test_what_is_not_served_is_refused_before_training(rule: str, why: str) -> None:
    model = nn.Linear(2, 1)
    guard = paceline.Guard(held_out=lambda: 0.0)
    with pytest.raises(paceline.UnsupportedError, match=why):
        paceline.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), rule, guard=guard)


def small(guard: Callable[[], Any], steps: int = 2) -> Callable[[], int]:
    def program() -> int:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with paceline.attach(model, optimizer, "bmuf(period=1)", guard=guard(), timeout_s=20) as run:
            for _ in range(steps):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        return run.world.size

    return program


def test_two_workers_have_no_majority_and_one_needs_none() -> None:
    program = small(lambda: paceline.Guard(held_out=lambda: 0.0))
    with pytest.raises(paceline.UnsupportedError, match="at least 3 workers"):
        simulate(program, 2)
    assert simulate(program, 1) == [1] and simulate(program, 3) == [3] * 3


def test_all_workers_must_have_a_function() -> None:
    def some() -> Any:
        here = paceline.communication.virtual.transport.current()
        assert here is not None
        return paceline.Guard(held_out=(lambda: 0.0) if here.world.rank else None)

    with pytest.raises(paceline.MismatchError, match="held_out"):
        simulate(small(some), 3)


def test_a_function_that_returns_no_number_is_named() -> None:
    with pytest.raises(paceline.UnsupportedError, match="held_out of the guard must return a number"):
        simulate(small(lambda: paceline.Guard(held_out=lambda: torch.zeros(3))), 3)


def test_arrays_of_other_libraries_refuse_it() -> None:
    with pytest.raises(paceline.UnsupportedError, match="leave held_out out"):
        paceline.attach_arrays([np.ones(3)], "bmuf", guard=paceline.Guard(held_out=lambda: 0.0))


def test_the_first_exchanges_are_all_judged() -> None:
    calls = [len(out["calls"]) for out in simulate(Training(steps=4 * FIRST), 4)]
    assert sum(calls) == FIRST * 3 * 3
