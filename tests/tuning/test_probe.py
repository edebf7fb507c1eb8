# SPDX-License-Identifier: Apache-2.0
"""The probe of `auto` among virtual workers with a clock: the same choice and bits everywhere, resumes, and where
gradients cannot be exchanged."""

from __future__ import annotations

import html
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.forecast.sim import Clock
from paceline.observe.reports.read import read_run
from paceline.rules import choice
from paceline.tuning.rule_chooser import WallProbeTimer
from paceline_plugins.report.report import write_report
from tests.helpers import Outcome, Place, Program, adam, attached, follow, momentum_sgd, same_bits

STEPS, PROBE = 40, 6
"""Of each of two workers, and of the probe."""


def clock(seconds: float) -> Clock:
    """A minibatch takes 10 ms, and each of an exchange's two messages so many seconds."""
    return Clock(compute=0.01, network=seconds)


FAST, SLOW, SLOWEST = 1e-6, 0.004, 0.02
"""Synchronous steps; blocks of four; longer ones."""


@pytest.fixture(autouse=True)
def long_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block makes a pass."""
    monkeypatch.setattr(choice, "BLOCKS", 1)


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
        assert out.extra["rules"][: PROBE - 1] == ["auto(sync_rate=0, reproducible=True)"] * (PROBE - 1)
        assert out.extra["rules"][PROBE + 1 :] == ["sync(reproducible=True)"] * (STEPS - PROBE - 1)
        assert out.extra["rules"] == outs[0].extra["rules"]
    assert_same(outs, go("sync(reproducible=True)", optimizer=adam))


def test_synchronous_steps_have_a_higher_rate() -> None:
    """At last twice that of one worker with four."""

    def rates(place: Place) -> None:
        place.extra.setdefault("rates", []).append(place.run._context.tuner.tunables.numbers()["lr"])

    outs = go(workers=4, after_step=rates)
    assert outs[3].extra["rates"] == pytest.approx(
        [0.1] * (PROBE + 2) + [0.1 * (4 / 3) ** 0.5] + [0.1 * 2**0.5] * 9 + [0.2] * (STEPS - PROBE - 12)
    )


@pytest.mark.parametrize(
    ("rule", "again"),
    [("auto(sync_rate=0)", "sync()"), ("auto(reproducible=True)", "auto(reproducible=True, share=0.99)")],
)
def test_the_line_on_synchronous_steps_says_how_to_repeat_them(
    rule: str, again: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="paceline"):
        outs = go(rule, optimizer=adam)
    assert f'To repeat: --rule "{again}"' in caplog.text
    assert_same(outs, go(again, optimizer=adam))


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


@pytest.mark.parametrize(
    ("seconds", "optimizer", "rule"),
    [
        (SLOW, momentum_sgd, "bmuf(period=4, overlap=2, warmup=7)"),  # 8 ms, 20 at most
        (SLOW, adam, "bmuf_adam(period=6, overlap=6, warmup=7)"),  # Adam's moments take twice as much more
        (SLOWEST, momentum_sgd, "bmuf(period=8, overlap=8, warmup=7)"),  # 40 ms, 80 at most
        (SLOWEST, adam, "bmuf_adam(period=24, overlap=24, warmup=7)"),
    ],
)
def test_a_slow_network_has_blocks(seconds: float, optimizer: Any, rule: str) -> None:
    """As if that rule had been asked for."""
    outs = go("auto(rate_exponent=0)", seconds, optimizer=optimizer)
    known = outs[0].extra["rules"]
    assert known[PROBE - 1] == "auto(rate_exponent=0)" and known[PROBE] == rule.replace(
        ")", ", rate_exponent=0, even=False)"
    )
    assert [out.extra["rules"] for out in outs] == [known] * 2
    assert same_bits(outs[0].model, outs[1].model) and same_bits(outs[0].model, outs[0].exported)
    assert_same(outs, go(rule, seconds, optimizer=optimizer))


def test_workers_that_run_out_of_data_choose_as_well() -> None:
    """Two of them in the probe, of which one joins the choice after its last step."""

    def program() -> tuple[str, float]:
        model = nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            model.weight.fill_(0.0)
        with attached(model, lr=1.0) as (run, _, optimizer):
            for _ in range([30, 3, 10][run.world.rank]):
                follow(optimizer, (-model(torch.ones(1, 1))).sum())
        return run.rule.text(), float(model.weight.detach())

    for seconds in (FAST, SLOW, SLOWEST):
        outs = paceline.simulate(program, 3, clock=clock(seconds))
        assert len(set(outs)) == 1
        assert outs[0] is not None and (outs[0][0] == "sync()") == (seconds == FAST)


# -- what is said ------------------------------------------------------------------------------------------------------
def test_the_log_and_the_report_say_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "paceline"):
        go("auto", SLOW, settings={"log": tmp_path / "log"})
    line = "bmuf(period=4, overlap=2): a gradient exchange takes 8 ms beside 0.01 s of computing"
    text = "bmuf(period=4, overlap=2, warmup=7, rate_exponent=0.29, even=False)"
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("auto")]
    assert said == [f'auto: {line}. To repeat: --rule "{text}"']
    run = read_run(tmp_path / "log")
    why = f"auto: {line.partition(': ')[2]}, the learning rate 1.22 times one worker's"
    assert (run.rule, run.why) == (text, why)
    write_report(tmp_path / "log", tmp_path / "report")
    assert html.escape(why) in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")


def test_a_run_that_is_started_again_takes_what_was_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its log, whatever the network is like now."""
    go("auto", SLOW, settings={"log": tmp_path})
    monkeypatch.setenv("PACELINE_RESTART", "1")
    [out, _] = go("auto", FAST, settings={"log": tmp_path})
    assert out.extra["rules"][PROBE:] == ["bmuf(period=4, overlap=2, warmup=7, rate_exponent=0.29, even=False)"] * (
        STEPS - PROBE
    )


def test_a_short_pass_has_short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred blocks of one minibatch need a hundred minibatches; without a clock too."""
    monkeypatch.setattr(choice, "BLOCKS", 100)
    assert {out.extra["rules"][-1] for out in go("auto", SLOW)} == {
        "bmuf(period=2, overlap=2, warmup=7, rate_exponent=0.29, even=False)"
    }
    torch.manual_seed(5)
    outs = paceline.simulate(Program("auto(probe=0)", samples=8 * 9, epochs=2, after_step=periods), 2)
    assert all(out is not None and out.extra["periods"] == [4] * 3 + [1] * 15 for out in outs)


def periods(place: Place) -> None:
    place.extra.setdefault("periods", []).append(place.run.rule.schedule.period)


# -- checkpoints -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seconds", [FAST, SLOW, SLOWEST])
@pytest.mark.parametrize("at", [3, PROBE, PROBE + 1, PROBE + 8])
def test_stop_and_resume(seconds: float, at: int, tmp_path: Path) -> None:
    """In the probe, where the choice is about to be made, and after it."""
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
        sync = tunables.rates.sync
        factor = tunables.rates.common if sync is None else sync.highest(place.optimizer)
        place.extra.setdefault("factor", factor * tunables.rates.factor(0))
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
    def program(rule: str) -> tuple[str, int, dict[str, torch.Tensor]]:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        run = paceline.attach(model, optimizer := make(model.parameters(), lr=0.01), rule, log=tmp_path / rule)
        steps(run, model, optimizer)
        run.close()
        return run.rule.text(), run.blocks, model.state_dict()

    outs, wants = (
        [out for out in paceline.simulate(partial(program, rule), 2, clock=clock(FAST)) if out is not None]
        for rule in ("auto", "auto(probe=0)")
    )
    for out, want in zip(outs, wants, strict=True):
        kind = "bmuf_adam" if make is torch.optim.Adam else "bmuf"
        assert out[0] == f"{kind}(period=4, rate_exponent=0.29, even=False)" and out[1] == want[1] > 1
        assert same_bits(out[2], want[2]) or steps is scaler_steps  # the first gradient had been exchanged
        assert same_bits(out[2], outs[0][2])
    assert why in read_run(tmp_path / "auto").why


@pytest.mark.parametrize(
    ("kind", "rule", "why"),
    [
        ("two", "auto", "auto: blocks of 4 minibatches without a probe: there are several optimizers"),
        ("one", "auto(probe=0)", "auto: blocks of 4 minibatches"),
        ("one", "bmuf(period=2, rate_exponent=0.29, even=False)", "bmuf: blocks of 2 minibatches"),
        ("one", "auto(probe=0, rate_exponent=0)", ""),
    ],
)
def test_a_rate_that_is_not_the_programs_is_logged(
    kind: str, rule: str, why: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And shown nowhere else."""

    def program() -> None:
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizers = [torch.optim.SGD([one], lr=0.1) for one in model.parameters()]
        one: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        paceline.attach(model, optimizers if kind == "two" else one, rule, log=tmp_path / "log").close()

    with caplog.at_level(logging.WARNING, logger="paceline"):
        paceline.simulate(program, 2, clock=clock(SLOW))
    assert not caplog.records
    logged = (tmp_path / "log" / "rank-000.jsonl").read_text()
    assert (f'"why": "{why}, the learning rate 1.22 times' in logged) == bool(why)


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
        with paceline.attach(model, optimizer, scaler=scaler) as run:
            found = run._context.tuner.measured.probing
        return bool(found)

    assert paceline.simulate(program, 2, clock=clock(FAST)) == [False, False]


# -- the wall clock ----------------------------------------------------------------------------------------------------
def test_the_clock_on_the_wall() -> None:
    """The usual step and the least exchange; the first step does not count, nor does waiting."""
    spent = [0.0, 0.0, 0.0]
    timer = WallProbeTimer(spent, 6)
    for computed_s, exchanged_s in ((1.0, 1.0), (2.0, 9.0), (2.0, 3.0), (50.0, 50.0), (3.0, 5.0), (9.0, 9.0)):
        assert timer.measured() is None
        for k, seconds in enumerate((computed_s, 9.0, exchanged_s)):
            spent[k] += seconds
        timer.stepped(0)
    assert timer.measured() == (3.0, 3.0)
