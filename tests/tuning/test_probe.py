# SPDX-License-Identifier: Apache-2.0
"""The probe of `auto` among virtual workers with a clock: the same choice and bits everywhere, resumes, and where
gradients cannot be exchanged."""

from __future__ import annotations

import html
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.forecast.sim import Clock
from paceline.observe.reports.read import read_run
from paceline.tuning.rule_chooser import WallProbeTimer
from paceline_plugins.report.report import write_report
from tests.helpers import Outcome, Place, Program, adam, momentum_sgd, same_bits

STEPS, PROBE = 40, 10
"""Of each of two workers, and of the probe."""
HALF = PROBE // 2


def clock(seconds: float) -> Clock:
    """A minibatch takes 10 ms, and each of an exchange's two messages so many seconds."""
    return Clock(compute=0.01, network=seconds)


FAST, SLOW, SLOWEST = 1e-6, 0.004, 0.02
"""Synchronous steps; blocks after the whole probe; blocks after half of it."""


def go(rule: str = "auto", seconds: float = FAST, workers: int = 2, **choices: Any) -> list[Outcome]:
    torch.manual_seed(5)
    program = Program(rule, **{"samples": 4 * workers * STEPS, "epochs": 1, "after_step": texts, **choices})
    return [out for out in paceline.simulate(program, workers, clock=clock(seconds)) if out is not None]


def texts(place: Place) -> None:
    place.extra.setdefault("rules", []).append(place.run.rule.text())


def assert_same(outs: list[Outcome], want: list[Outcome], begin: int = 0) -> None:
    for out, other in zip(outs, want, strict=True):
        assert same_bits(out.model, other.model) and same_bits(out.exported, other.exported)
        assert out.losses == other.losses[begin:]


# -- what is chosen ----------------------------------------------------------------------------------------------------


def test_a_fast_network_keeps_synchronous_steps() -> None:
    outs = go("auto(sync_rate=0, reproducible=True)", optimizer=adam)
    for out in outs:
        assert out.extra["rules"][:9] == ["auto(sync_rate=0, reproducible=True)"] * 9
        assert out.extra["rules"][11:] == ["sync(reproducible=True)"] * (STEPS - 11)
        assert out.extra["rules"] == outs[0].extra["rules"]
    assert_same(outs, go("sync(reproducible=True)", optimizer=adam))


def test_synchronous_steps_have_a_higher_rate() -> None:
    """Twice that of one worker, with four."""

    def rates(place: Place) -> None:
        place.extra.setdefault("rates", []).append(place.run._context.tuner.tunables.numbers()["lr"])

    outs = go(workers=4, after_step=rates)
    assert outs[3].extra["rates"] == pytest.approx([0.1] * PROBE + [0.2] * (STEPS - PROBE))


@pytest.mark.parametrize(
    ("rule", "steps", "factor"),
    [("auto", PROBE, 2**0.29), ("auto(rate_exponent=1)", PROBE, 2.0), ("auto(probe=0)", 0, 2**0.29)],
)
def test_blocks_have_a_higher_rate(rule: str, steps: int, factor: float) -> None:
    def rates(place: Place) -> None:
        place.extra.setdefault("rates", []).append(place.run._context.tuner.tunables.numbers()["lr"])

    def moved(place: Place) -> None:
        place.extra.setdefault("lr", []).append(place.optimizer.param_groups[0]["lr"])
        rates(place)

    outs = go(rule, SLOW, after_step=moved)
    for out in outs:
        assert out.extra["rates"] == pytest.approx([0.1] * steps + [0.1 * factor] * (STEPS - steps))
        assert set(out.extra["lr"]) == {0.1}, "the program sees its own rate"


@pytest.mark.parametrize("optimizer", [momentum_sgd, adam])
@pytest.mark.parametrize(
    ("seconds", "steps", "sgd", "of_adam"),
    [
        (SLOW, PROBE + 1, "overlap=1", "overlap=3"),  # 8 ms; Adam's moments take 16 more
        (SLOWEST, HALF + 1, "overlap=3, codec='bf16'", "first=15, overlap=15"),  # 40 ms, and 20
    ],
)
def test_a_slow_network_has_blocks(seconds: float, steps: int, sgd: str, of_adam: str, optimizer: Any) -> None:
    """As if that rule had been asked for, with a warm-up of as many steps."""
    if optimizer is adam and seconds == SLOWEST:
        of_adam = "first=15, overlap=15"
    settings = of_adam if optimizer is adam else sgd
    outs = go("auto(rate_exponent=0)", seconds, optimizer=optimizer)
    known = outs[0].extra["rules"]
    assert known[steps - 2] == "auto(rate_exponent=0)" and known[steps - 1].startswith("auto(rate_exponent=0, probe=0")
    assert [out.extra["rules"] for out in outs] == [known] * 2
    assert same_bits(outs[0].model, outs[1].model) and same_bits(outs[0].model, outs[0].exported)
    if seconds == SLOW:
        assert_same(
            outs, go(f"auto(probe=0, rate_exponent=0, warmup={steps}, {settings})", seconds, optimizer=optimizer)
        )


def test_workers_that_run_out_of_data_choose_as_well() -> None:
    """Two of them in the probe, of which one joins the choice after its last step."""

    def program() -> tuple[str, float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        run = paceline.attach(model, optimizer)
        for _ in range([30, 3, 10][run.world.rank]):
            optimizer.zero_grad()
            (-model(torch.ones(1, 1))).sum().backward()
            optimizer.step()
        run.close()
        return run.rule.text(), float(model.weight.detach())

    for seconds in (FAST, SLOW, SLOWEST):
        outs = paceline.simulate(program, 3, clock=clock(seconds))
        assert len(set(outs)) == 1
        assert outs[0] is not None and (outs[0][0] == "sync()") == (seconds == FAST)


# -- what is said ------------------------------------------------------------------------------------------------------


def test_the_log_and_the_report_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        go("auto", SLOW, settings={"log": tmp_path / "log"})
    why = (
        "auto: blocks of 4 minibatches, dense, overlapped by 1: exchanging gradients keeps a worker for 8 ms beside "
        "0.01 s of computing (limit 2 %); the learning rate is 1.22 times one worker's"
    )
    assert [line.getMessage() for line in caplog.records if line.getMessage().startswith("auto")] == [why]
    run = read_run(tmp_path / "log")
    assert (run.rule, run.why) == ("auto(probe=0, overlap=1, codec='dense')", why)
    write_report(tmp_path / "log", tmp_path / "report")
    assert html.escape(why) in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [FAST, SLOW, SLOWEST])
@pytest.mark.parametrize("at", [3, HALF + 2, PROBE, PROBE + 1, PROBE + 8])
def test_stop_and_resume(seconds: float, at: int, tmp_path: Path) -> None:
    """In either half of the probe, where the choice is about to be made, and after it."""
    full: dict[str, Any] = {"optimizer": adam, "dropout": 0.3, "schedule": True, "save_to": tmp_path / "c"}
    whole = go("auto", seconds, **full)
    go("auto", seconds, **full, save_at=at, stop_at=at)
    resumed = go("auto", seconds, **full, resume=tmp_path / "c")
    assert_same(resumed, whole, at)
    assert [out.extra["rules"] for out in resumed] == [out.extra["rules"][at:] for out in whole]


@pytest.mark.parametrize(("before", "after"), [(FAST, SLOW), (SLOW, FAST), (SLOW, SLOWEST), (SLOWEST, SLOW)])
@pytest.mark.parametrize("workers", [1, 3])
def test_another_number_of_workers_takes_over_the_choice(
    before: float, after: float, workers: int, tmp_path: Path
) -> None:
    """Whatever the network is like now; the learning rate has the factor of the present number of workers."""
    saved = go("auto", before, optimizer=adam, save_at=24, stop_at=24, save_to=tmp_path / "c")
    assert saved[0].extra["rules"][-1] != "auto()"

    def start(place: Place) -> None:
        tunables = place.run._context.tuner.tunables
        place.extra.setdefault("factor", tunables.rates.common * tunables.rates.factor(0))
        texts(place)

    outs = go("auto", after, workers, optimizer=adam, resume=tmp_path / "c", after_step=start, epochs=2, samples=320)
    choice = saved[0].extra["rules"][-1] if workers == 3 else "auto()"
    factor = 1.0 if workers == 1 else 3**0.5 if before == FAST else 3**0.29
    for out in outs:
        assert set(out.extra["rules"]) == {choice} and out.extra["factor"] == pytest.approx(factor)
        assert same_bits(out.model, outs[0].model)


# -- where gradients cannot be exchanged -------------------------------------------------------------------------------


def closure_steps(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(8):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)


def scaler_steps(run: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(8):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 3)).square().sum()).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize(
    ("steps", "why"), [(closure_steps, "step(closure) computes"), (scaler_steps, "a GradScaler makes the steps")]
)
def test_a_loop_whose_gradients_cannot_be_exchanged_has_blocks(steps: Any, why: str, make: Any, tmp_path: Path) -> None:
    def program(rule: str) -> Any:
        def run_it() -> tuple[str, int, dict[str, torch.Tensor]]:
            torch.manual_seed(1)
            model = nn.Linear(3, 1)
            run = paceline.attach(model, optimizer := make(model.parameters(), lr=0.01), rule, log=tmp_path / rule)
            steps(run, model, optimizer)
            run.close()
            return run.rule.text(), run.blocks, model.state_dict()

        return run_it

    outs = [out for out in paceline.simulate(program("auto"), 2, clock=clock(FAST)) if out is not None]
    wants = [out for out in paceline.simulate(program("auto(probe=0)"), 2, clock=clock(FAST)) if out is not None]
    for out, want in zip(outs, wants, strict=True):
        assert out[0] == "auto(probe=0, overlap=0, codec='dense')" and out[1] == want[1] > 1
        assert same_bits(out[2], want[2]) or steps is scaler_steps  # the first gradient had been exchanged
        assert same_bits(out[2], outs[0][2])
    assert why in read_run(tmp_path / "auto").why


@pytest.mark.parametrize(
    ("kind", "rule", "told"),
    [
        ("chosen", "auto", "auto: blocks of "),
        ("two", "auto", "auto: blocks of 4 minibatches without a probe: there are several optimizers"),
        ("one", "auto(probe=0)", "auto: blocks of 4 minibatches"),
        ("one", "bmuf(period=2, rate_exponent=0.29)", "bmuf: blocks of 2 minibatches"),
        ("one", "auto(probe=0, rate_exponent=0)", ""),
        ("one", "bmuf(period=2)", ""),
    ],
)
def test_a_rate_that_is_not_the_programs_is_told(
    kind: str, rule: str, told: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where it can be seen without a log, once, and in the log."""

    def program() -> None:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizers = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
        one: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        with paceline.attach(model, optimizers if kind == "two" else one, rule, log=tmp_path / "log"):
            for _ in range(14):
                model(torch.ones(2, 3)).square().sum().backward()
                for optimizer in optimizers if kind == "two" else [one]:
                    optimizer.step()
                    optimizer.zero_grad()

    with caplog.at_level(logging.WARNING, logger="paceline"):
        paceline.simulate(program, 2, clock=clock(SLOW))
    said = [record.getMessage() for record in caplog.records if "one worker's" in record.getMessage()]
    assert len(said) == bool(told)
    assert all(one.startswith(told) and one.endswith("; the learning rate is 1.22 times one worker's") for one in said)
    logged = (tmp_path / "log" / "rank-000.jsonl").read_text()
    assert all(f'"why": {json.dumps(one)}' in logged for one in said)


@pytest.mark.parametrize("kind", ["two", "lbfgs", "scaler", "sparse", "arrays"])
def test_what_is_known_at_attach_begins_with_blocks(kind: str) -> None:
    def program() -> bool:
        model = nn.Sequential(nn.Embedding(4, 3, sparse=kind == "sparse"), nn.Linear(3, 1))
        parameters = list(model.parameters())
        if kind == "arrays":
            array = parameters[0].detach().numpy()
            with paceline.attach_arrays([array], "auto") as run:
                for _ in range(6):
                    array += 1.0
                    run.step()
                return bool(run._context.tuner.measured.probing)
        optimizer: Any = torch.optim.SGD(parameters, lr=0.1)
        scaler = torch.amp.GradScaler("cpu") if kind == "scaler" else None
        if kind == "two":
            optimizer = [torch.optim.SGD(parameters[:1], lr=0.1), torch.optim.Adam(parameters[1:])]
        if kind == "lbfgs":
            optimizer = torch.optim.LBFGS(parameters)
        run = paceline.attach(model, optimizer, scaler=scaler)
        found = run._context.tuner.measured.probing
        run.close()
        return bool(found)

    assert paceline.simulate(program, 2, clock=clock(FAST)) == [False, False]


# -- the wall clock ----------------------------------------------------------------------------------------------------


def test_the_clock_on_the_wall() -> None:
    """Steps of 2 s and exchanges of 3 after the pass, then 2.5 and 1 during it: 1 s, and 0.4 beyond 5 % of 2."""
    spent = [0.0, 0.0, 0.0]
    timer = WallProbeTimer(spent, 6, torch.device("cpu"))

    def step(computed_s: float, exchanged_s: float) -> None:
        for k, seconds in enumerate((computed_s, 9.0, exchanged_s)):  # waiting does not count
            spent[k] += seconds
        timer.stepped(0)

    for k in range(3):
        assert timer.measured() is None and not timer.early
        step(*((50.0, 50.0) if k == 0 else (2.0, 3.0)))
    assert timer.early and timer.measured() == (2.0, 3.0, None)
    for k in range(3):
        step(*((50.0, 50.0) if k == 0 else (2.5, 1.0)))
    assert timer.measured() == (2.0, 3.0, pytest.approx(1.4))
    assert 0 < timer.codec_s("int8", 1000) < 10
