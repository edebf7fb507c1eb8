# SPDX-License-Identifier: Apache-2.0
"""One table of recipes times one list of laws, on virtual workers."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.rules.codec import Dense, Layout
from paceline.rules.rule import Rule
from paceline.rules.schedule import EveryBlock
from paceline.rules.traffic import FOOTER_BYTES, HEADER_BYTES, bytes_per_block, overhead_bytes
from paceline.update.engine.gradients import update as gradient_update
from tests.helpers import (
    Outcome,
    Place,
    Program,
    adam,
    attached,
    follow,
    make_data,
    make_net,
    momentum_sgd,
    same_bits,
    sgd,
    simulate,
    state_of,
    train,
)

pytestmark = pytest.mark.law


@dataclass(frozen=True)
class Case:
    """A row of the table.

    Attributes:
        rule: as text.
        optimizer: params -> optimizer.
    """

    rule: str
    optimizer: Callable[[Any], torch.optim.Optimizer] = momentum_sgd

    @property
    def block(self) -> bool:
        return "period" in self.rule or self.rule.startswith("auto")

    @property
    def blocking(self) -> bool:
        """Whether all workers hold one model after an exchange, whole."""
        return "overlap" not in self.rule and "fragments" not in self.rule

    @property
    def built(self) -> Rule:
        return paceline.rule_from_text(self.rule)

    @property
    def schedule(self) -> EveryBlock:
        schedule = self.built.schedule
        assert isinstance(schedule, EveryBlock)
        return schedule


ROWS = [
    Case("sync"),
    Case("averaging(period=3)"),
    Case("averaging(period=3, warmup=4)"),
    Case("averaging(period=3, local_state='average')"),
    Case("bmuf(period=3)"),
    Case("bmuf(period=3, local_state='compensate')"),
    Case("bmuf(period=3, warmup=4, ramp=2)", adam),
    Case("bmuf(period=3, nesterov=False)"),
    Case("bmuf_adam(period=3)", adam),
    Case("bmuf_adam(period=3, warmup=4)", adam),
    Case("bmuf_adam(period=3, nesterov=False)", adam),
    Case("bmuf_adam(period=3, local_state='average')", adam),
    Case("bmuf_adam(period=3, local_state='keep')", adam),
    Case("bmuf_adam(period=3, local_state='reset')", adam),
    Case("diloco(period=3)", adam),
    Case("sync(codec='bf16')"),
    Case("sync(codec='int8', warmup=2)"),
    Case("sync(codec='e3m0')", adam),
    Case("sync(dimensions='hosts')"),
    Case("one_bit(warmup=3)"),
    Case("one_bit(warmup=0, feedback=False)"),
    Case("power(rank=1, warmup=2)"),
    Case("top_k(ratio=0.2, warmup=2)"),
    Case("top_k(ratio=0.2, momentum=0.5, warmup=0)", sgd),
    Case("one_bit_adam(warmup=4)", adam),
    Case("averaging(period=3, codec='one_bit')"),
    Case("bmuf(period=3, codec='int8', warmup=4)"),
    Case("bmuf_adam(period=3, codec='fp16')", adam),
    Case("diloco(period=3, codec='sign')", adam),
    Case("averaging(period=3, codec='low_rank(rank=1)')"),
    Case("bmuf(period=3, codec='top_k(ratio=0.3)')"),
    Case("bmuf(period=3, fragments=3)"),
    Case("bmuf(period=3, overlap=2)"),
    Case("bmuf(period=3, overlap=3, local_state='compensate')"),
    Case("bmuf_adam(period=4, overlap=3, fragments=2)", adam),
    Case("averaging(period=3, overlap=1, warmup=4, local_state='average', codec='one_bit')"),
    Case("streaming_diloco(period=4, overlap=2, fragments=3)", adam),
    Case("streaming_diloco(period=3, overlap=3, fragments=2, mixing=None, warmup=2)", adam),
    Case("auto(first=3, probe=0)", adam),
    Case("bmuf(period=3, ema=0.6)"),
    Case("bmuf_adam(period=3, gain='paper')", adam),
    Case("diloco(period=3, ramp=2)"),
    Case("streaming_diloco(period=4, overlap=2, fragments=3, ema=0.6)", adam),
]


def reproducible(case: Case) -> Case:
    name, bracket, rest = case.rule.partition("(")
    rule = f"{name}({rest[:-1]}, reproducible=True)" if bracket else f"{name}(reproducible=True)"
    return Case(rule, case.optimizer)


SHORT = [ROWS[k] for k in (0, 2, 4, 6, 8, 9, 12, 14, 19, 21, 23, 24, 32, 34, 36, 37)]
FAST = [ROWS[k] for k in (0, 4, 8, 21, 24, 36)]
"""Each mechanism once."""
TABLE = ROWS + [reproducible(case) for case in SHORT]
BLOCKS = [case for case in ROWS if case.block]
ALONE = [  # each worker exchanges by itself: laws 2, 6 and 8 as they are; the others are in tests/update/server
    Case("asgd()", sgd),
    Case("asgd(period=3)", adam),
    Case("ssp(staleness=2)"),
    Case("adadelay()", sgd),
    Case("staleness_aware()", sgd),
    Case("momentum_tuned()"),
    Case("dc_asgd(kind='adaptive')", adam),
    Case("easgd(period=3)", adam),
]


def rows(cases: list[Case], fast: list[Case] | None = None, rest: str = "slow") -> pytest.MarkDecorator:
    """A test of each case: of `fast`, or of `FAST` and every fourth one of `ALONE`, in the fast tier; of the rest of
    `SHORT` and `ALONE` in `make test-all`; and of all others where `rest` says."""
    kept = {case.rule for case in ([*FAST, *ALONE[::4]] if fast is None else fast)}
    short = {case.rule for case in (*SHORT, *ALONE)}

    def marks(case: Case) -> list[pytest.MarkDecorator]:
        tier = "full" if case.rule in short else rest
        return [] if case.rule in kept else [getattr(pytest.mark, tier)]

    marked = [pytest.param(case, marks=marks(case)) for case in cases]
    return pytest.mark.parametrize("case", marked, ids=[case.rule for case in cases])


def go(case: Case, workers: int = 3, **choices: Any) -> list[Outcome]:
    return train(case.rule, workers, optimizer=case.optimizer, **choices)


def assert_agree(outs: list[Outcome]) -> None:
    for out in outs[1:]:
        assert same_bits(out.model, outs[0].model)
        assert same_bits(out.exported, outs[0].exported)
    assert same_bits(outs[0].model, outs[0].exported)


# -- 1: all hold the same bits -----------------------------------------------------------------------------------------
def landings(case: Case, last: int) -> set[int]:
    """After which steps (from 1) an exchange has landed whole, so that all workers hold one global model."""
    if not case.block:
        return set(range(1, last + 1))
    schedule = case.schedule
    begun = (schedule.warmup + schedule.ends(exchange) for exchange in range(last))
    return set(range(1, schedule.warmup + 1)) | {step + schedule.overlap for step in begun}


@rows(TABLE)
def test_law_1_same_bits_after_every_synchronisation(case: Case) -> None:
    """The global model always; what the workers hold only where they stand still for the exchange of it all."""
    landed = landings(case, 60)

    def after(place: Place) -> None:
        if place.run.minibatches in landed:
            place.extra.setdefault("starts", []).append(state_of(place.model))
            place.extra.setdefault("global", []).append(place.run.global_state())

    outs = go(case, samples=62, norm=True, dropout=0.2, after_step=after)
    assert_agree(outs)
    assert len(outs[0].extra["starts"]) >= 3
    names = [n for n in outs[0].model if "running" not in n and "num_batches" not in n]
    for what in ("global", "starts") if case.blocking else ("global",):
        for out in outs[1:]:
            for one, other in zip(out.extra[what], outs[0].extra[what], strict=True):
                assert same_bits({n: one[n] for n in names}, {n: other[n] for n in names})


@rows([case for case in ROWS if case.block and not case.blocking])
def test_law_1_workers_are_apart_between_exchanges(case: Case) -> None:
    """Else the test above would hold for a rule without overlap."""

    def after(place: Place) -> None:
        if place.run.minibatches == 8:
            place.extra["model"] = state_of(place.model)

    outs = go(case, samples=96, after_step=after)
    assert not same_bits(outs[0].extra["model"], outs[1].extra["model"])


def tamper_anchor(place: Place) -> None:
    if place.rank == 1 and place.run.minibatches == 7:
        block = place.run._state.blocks
        assert block is not None
        block.updates[0].state.parameters[0].anchor[5] += 1e-3


@rows(BLOCKS)
def test_law_1_a_tampered_anchor_is_found_and_named(case: Case) -> None:
    with pytest.raises(paceline.DesyncError, match=r"rank 1 on \S+ differ") as caught:
        go(case, samples=96, after_step=tamper_anchor)
    assert "rank 0 on" not in str(caught.value).split("differ")[0]


def test_law_1_a_tampered_delta_is_found() -> None:
    def after(place: Place) -> None:
        if place.rank == 2 and place.run.minibatches == 4:
            block = place.run._state.blocks
            assert block is not None
            block.updates[0].state.tensors()["parameters/float32/0/delta"][0] += 1.0

    with pytest.raises(paceline.DesyncError, match="rank 2 on"):
        go(Case("bmuf(period=3)"), samples=96, after_step=after)


def test_law_1_a_tampered_replica_is_found_under_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_update, "CHECK_EVERY", 4)

    def after(place: Place) -> None:
        if place.rank == 2 and place.run.minibatches == 2:
            with torch.no_grad():
                next(iter(place.model.parameters())).view(-1)[0] += 1e-4

    with pytest.raises(paceline.DesyncError, match="rank 2 on"):
        go(Case("sync"), samples=96, after_step=after)


def test_law_1_an_untampered_sync_run_passes_its_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_update, "CHECK_EVERY", 2)
    assert_agree(go(Case("sync"), samples=96))


# -- 2: deterministic --------------------------------------------------------------------------------------------------
@rows(SHORT + ALONE)
def test_law_2_same_seed_same_bits(case: Case) -> None:
    one, other = (go(case, samples=50, dropout=0.3) for _ in range(2))
    assert same_bits(one[0].model, other[0].model)
    assert [o.losses for o in one] == [o.losses for o in other]


def test_law_2_another_seed_is_another_order() -> None:
    case = Case("bmuf(period=3)", sgd)
    one, other = (go(case, settings={"seed": seed}) for seed in (0, 1))
    assert not same_bits(one[0].model, other[0].model)


# -- 3: stop anywhere, resume ------------------------------------------------------------------------------------------

FULL: dict[str, Any] = {"dropout": 0.3, "norm": True, "schedule": True, "samples": 50, "epochs": 3}


@pytest.mark.law(every=4)  # tests/checkpoint/test_exact.py resumes each family
@rows(ROWS, rest="full")
def test_law_3_stop_and_resume(case: Case, tmp_path: Path) -> None:
    """50 samples, 3 workers, batches of 4: 5 steps an epoch; 7 is in the middle of an epoch and of a block.

    The run that saves at the first place goes on, the one that saves at the second stops there.
    """
    middle, end = (7, 9) if "warmup" not in case.rule else (3, 7)
    whole = go(case, **FULL)
    going_on = go(case, **FULL, save_at=middle, save_to=tmp_path / str(middle))
    assert same_bits(going_on[0].model, whole[0].model), "saving changed the trajectory"
    stopped = go(case, **FULL, save_at=end, save_to=tmp_path / str(end), stop_at=end)
    assert [one.losses for one in stopped] == [one.losses[:end] for one in whole]
    for at in (middle, end):
        resumed = go(case, **FULL, resume=tmp_path / str(at))
        for one, other in zip(resumed, whole, strict=True):
            assert same_bits(one.model, other.model)
            assert one.losses == other.losses[at:]
            assert one.minibatches == other.minibatches


@pytest.mark.parametrize("at", [1, 4, 5, 6, 14, 15])
def test_law_3_at_any_minibatch(at: int, tmp_path: Path) -> None:
    case = Case("bmuf_adam(period=4, ramp=2)", adam)
    whole = go(case, **FULL)
    go(case, **FULL, save_at=at, save_to=tmp_path / "c", stop_at=at)
    resumed = go(case, **FULL, resume=tmp_path / "c")
    assert [o.losses for o in resumed] == [o.losses[at:] for o in whole]
    assert_agree(resumed)
    assert same_bits(resumed[0].model, whole[0].model)


@pytest.mark.parametrize("at", [3, 13, 14, 30])
def test_law_3_with_one_worker(at: int, tmp_path: Path) -> None:
    case = Case("bmuf(period=4)")
    whole = go(case, 1, **FULL)[0]
    go(case, 1, **FULL, save_at=at, save_to=tmp_path / "c", stop_at=at)
    resumed = go(case, 1, **FULL, resume=tmp_path / "c")[0]
    assert resumed.losses == whole.losses[at:]
    assert same_bits(resumed.model, whole.model)


# -- 5: bytes ----------------------------------------------------------------------------------------------------------
def sent_by(
    case: Case, workers: int, shapes: list[tuple[int, ...]], steps: int, rank: int
) -> tuple[list[int], list[int], int]:
    """What the formulas say that a worker has sent after each step, at least and at most, and after close.

    The two differ while an exchange is under way, for its later operations start when it lands.
    """
    rule, hosts = case.built, ["vm"] * workers
    header, footer = HEADER_BYTES * (workers - 1), FOOTER_BYTES * (workers - 1)
    backwards = Layout.of(reversed(shapes))  # gradients travel in the order in which backward makes them
    order = 8 * len(shapes) * (workers - 1) if rank == 0 else 0
    began, landed = [0] * steps, [0] * steps
    if not case.block:
        for k in range(steps):
            began[k] = bytes_per_block(rule, workers, backwards, rank=rank, hosts=hosts, exchange=k)
            began[k] += overhead_bytes(rule, workers) + (order if k == 0 else 0)
        total = sum(began) + 2 * header  # equal on all workers
        return list(accumulate(began)), list(accumulate(began)), total
    schedule, moments = case.schedule, 2 if case.optimizer is adam else 1
    for step in range(schedule.warmup):
        began[step] = rule.topology.bytes_sent(Dense(), backwards, hosts, rank) + header + footer
        began[step] += order if step == 0 else 0
    if schedule.warmup:
        began[schedule.warmup - 1] += header  # says that it is over
    landed = list(began)
    parts = parts_of(shapes, schedule.fragments)

    def size(number: int) -> int:
        block, fragment = divmod(number, schedule.fragments)
        layout = Layout.of(shapes[n] for n in parts[fragment])
        return bytes_per_block(rule, workers, layout, moments=moments, rank=rank, hosts=hosts, exchange=block) + header

    number = 0
    while (step := schedule.warmup + schedule.ends(number)) <= steps:
        began[step - 1] += size(number)
        if step + schedule.overlap <= steps:
            landed[step + schedule.overlap - 1] += size(number)
        number += 1
    total = sum(began) + header
    for last in range(number, number + schedule.fragments):  # close: what every fragment has since its last exchange
        before = schedule.ends(last - schedule.fragments) if last >= schedule.fragments else 0
        total += size(last) if schedule.warmup + before < steps else header
    return list(accumulate(landed)), list(accumulate(began)), total


def parts_of(shapes: list[tuple[int, ...]], fragments: int) -> list[list[int]]:
    """Which parameters each fragment has, by hand: layers, or single parameters where there are too few."""
    assert shapes == [(8, 4), (4, 8), (4,)]
    return {1: [[0, 1, 2]], 2: [[0], [1, 2]], 3: [[0], [1], [2]]}[fragments]


@rows(TABLE, rest="full")
def test_law_5_bytes_sent_are_the_formula(case: Case) -> None:
    workers, steps = 4, 13  # every tensor's size is divisible by N, so that nothing is rounded

    def program() -> list[int]:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 4))
        with attached(model, case.rule, case.optimizer) as (run, _, optimizer):
            before = run.bytes_sent
            sent = []
            for _ in range(steps):
                follow(optimizer, model(torch.randn(4, 4)).sum())
                sent.append(run.bytes_sent - before)
        return [*sent, run.bytes_sent - before]

    for rank, sent in enumerate(simulate(program, workers)):
        least, most, total = sent_by(case, workers, [(8, 4), (4, 8), (4,)], steps, rank)
        assert all(low <= n <= high for low, n, high in zip(least, sent[:-1], most, strict=True))
        assert sent[-1] == total


def test_law_5_the_formula_in_numbers() -> None:
    build = {name: recipe.build() for name, recipe in paceline.RECIPES.items()}
    assert bytes_per_block(build["bmuf"], 4, 1000) == 2 * 3 * 4 * 1000 // 4
    assert bytes_per_block(build["bmuf_adam"], 4, 1000) == 3 * 2 * 3 * 4 * 1000 // 4
    assert bytes_per_block(build["diloco"], 4, 1000, buffers=40) == 2 * 3 * 4 * 1040 // 4
    assert bytes_per_block(build["sync"], 1, 1000) == 0


def test_law_5_buffers_count_too() -> None:
    def program() -> tuple[int, int]:
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
        optimizer = sgd(model.parameters())
        run = paceline.attach(model, optimizer, "averaging", period=1)
        before = run.bytes_sent
        model(torch.randn(4, 4)).sum().backward()
        optimizer.step()
        return run.bytes_sent - before, bytes_per_block(run.rule, 2, 40 + 16, buffers=16 + 2)

    sent, formula = simulate(program, 2)[0]
    assert sent == formula + HEADER_BYTES


# -- 6: converges ------------------------------------------------------------------------------------------------------
def known_second_moment(case: Case) -> Case:
    """1-bit Adam needs a warm-up as long as v takes to be known: after 4 steps it is that of the start, where gradients
    are large, and the frozen optimizer creeps (as it does when v is frozen by hand)."""
    return Case(case.rule.replace("warmup=4", "warmup=60"), case.optimizer) if "one_bit_adam" in case.rule else case


class Quadratic(nn.Module):
    """A vector, whole or (for rules that exchange fragments) in three parts."""

    def __init__(self, parts: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in parts)

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.parts))


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@rows([known_second_moment(case) for case in ROWS], fast=[known_second_moment(case) for case in FAST])
def test_law_6_the_quadratic(case: Case, workers: int) -> None:
    """Workers see minima of their own, whose mean is the answer."""
    scales = torch.tensor([1.0, 0.5, 0.2, 0.05])
    answer = torch.tensor([1.0, -2.0, 3.0, 0.5])

    def program() -> float:
        transport = paceline.communication.virtual.transport.current()
        assert transport is not None
        own = answer + 0.3 * (transport.world.rank - (workers - 1) / 2) * torch.tensor([1.0, -1.0, 1.0, -1.0])
        model = Quadratic([2, 1, 1] if "fragments" in case.rule else [4])
        optimizer: torch.optim.Optimizer
        if case.optimizer is adam:
            rate = 0.1 if "one_bit_adam" in case.rule else 0.05
            optimizer = torch.optim.Adam(model.parameters(), lr=rate, betas=(0.5, 0.9))
        else:
            momentum = 0.0 if case.optimizer is sgd else 0.3
            optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
        with paceline.attach(model, optimizer, case.rule):
            fall = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.985)
            for _ in range(360):
                follow(optimizer, (scales * (model() - own) ** 2).sum())
                fall.step()
        return float((scales * (model().detach() - answer) ** 2).sum())

    finals = simulate(program, workers)
    assert len(set(finals)) == 1
    assert finals[0] < 0.02


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
@rows(SHORT + ALONE)
def test_law_6_the_small_net(case: Case, workers: int) -> None:
    outs = go(case, workers, samples=48 * workers, epochs=6)
    x, y = make_data(48 * workers).tensors
    model = make_net()
    before = float(nn.functional.cross_entropy(model(x), y).detach())
    model.load_state_dict(outs[0].exported)
    assert float(nn.functional.cross_entropy(model(x), y).detach()) < 0.7 * before


# -- 7: buffers --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["bmuf(period=2, gain='paper')", "averaging(period=2)", "diloco(period=2)"])
def test_law_7_buffers_are_averaged_exported_and_not_extrapolated(rule: str) -> None:
    def program() -> list[Any]:
        with attached(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, momentum=0.5)), rule) as (run, model, optimizer):
            found = []
            for step in range(6):
                optimizer.zero_grad()
                model(torch.randn(5, 3) * (1 + run.world.rank)).square().sum().backward()
                local = model[1].running_var.clone()
                optimizer.step()
                if step % 2 == 1:
                    exported = run.model_for_export()[1]
                    found.append((local, model[1].running_var.clone(), exported.running_var.clone()))
                    assert int(exported.num_batches_tracked) == int(model[1].num_batches_tracked) == step + 1
        return found

    outs = simulate(program, 3)
    for block in zip(*outs, strict=True):
        mean = torch.stack([local for local, _, _ in block]).mean(0)
        assert float((block[0][0] - mean).abs().max()) > 1e-3  # the workers differed
        for _, own, exported in block:
            torch.testing.assert_close(own, mean)
            assert torch.equal(exported, own)


# -- 8: contributions that are not finite ------------------------------------------------------------------------------
@rows(ROWS + ALONE)
def test_law_8_a_worker_with_nan_is_left_out(case: Case, caplog: pytest.LogCaptureFixture) -> None:
    def factor(place: Place) -> float:
        return float("nan") if place.rank == 1 and place.run.minibatches == 5 else 1.0

    with caplog.at_level(logging.WARNING, logger="paceline"):
        outs = go(case, samples=96, factor=factor)
    assert_agree(outs)
    assert all(bool(torch.isfinite(v).all()) for v in outs[0].model.values())
    quiet = ("auto: ", "period stays", "the learning rate is", "Adam's own moments")
    said = [line for r in caplog.records if not any(one in (line := r.getMessage()) for one in quiet)]
    assert said and all("worker 1 on" in line and "worker 0" not in line for line in said)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_law_8_the_mean_is_that_of_the_accepted_workers(value: float) -> None:
    def program() -> float:
        with attached(nn.Linear(1, 1, bias=False), "averaging", period=1) as (run, model, optimizer):
            with torch.no_grad():
                model.weight.fill_(value if run.world.rank == 2 else float(run.world.rank + 1))
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        return float(model.weight.detach())

    assert simulate(program, 3) == [1.5, 1.5, 1.5]


def test_law_8_inf_minus_inf_does_not_hide() -> None:
    """Finiteness is tested by a sum: opposite infinities, and large finite numbers, must be told apart."""

    def program(values: list[float]) -> float:
        with attached(nn.Linear(2, 1, bias=False), "averaging", period=1, guard=None) as (run, model, optimizer):
            with torch.no_grad():
                model.weight.copy_(torch.tensor([values if run.world.rank == 1 else [0.0, 0.0]]))
            model.weight.grad = torch.zeros_like(model.weight)
            optimizer.step()
        return float(model.weight.detach()[0, 0])

    assert simulate(partial(program, [float("inf"), float("-inf")]), 2)[0] == 0.0
    assert simulate(partial(program, [3e38, 3e38]), 2)[0] == pytest.approx(1.5e38)


@rows(SHORT)
def test_law_8_nothing_finite_is_an_error_on_all(case: Case) -> None:
    """At once, or under overlap when the exchange lands: on all alike, with nothing applied."""

    def before(place: Place) -> None:
        if place.run.minibatches == 5:
            for p in place.model.parameters():
                p.grad.fill_(float("nan"))  # type: ignore[union-attr]

    seen = []

    def program() -> None:
        try:
            Program(case.rule, optimizer=case.optimizer, samples=96, before_step=before)()
        except paceline.NonFiniteError as error:
            seen.append(str(error))

    with contextlib.suppress(paceline.NonFiniteError):  # other fragments land when the run ends, and find the same
        simulate(program, 3)
    assert len(seen) == 3
    assert all("rank" in text and "inf or nan" in text for text in seen)


def test_law_8_after_the_error_the_global_model_is_untouched_and_training_can_go_on() -> None:
    def program() -> list[float]:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.9))
        with paceline.attach(model, optimizer, "bmuf_adam", period=2) as run:
            corrected = []
            for step in range(10):
                optimizer.zero_grad()
                model(torch.ones(4, 3)).sum().backward()
                if step == 3:
                    before = run.global_state()
                    model.weight.grad.fill_(float("nan"))  # type: ignore[union-attr]
                    with pytest.raises(paceline.NonFiniteError):
                        optimizer.step()
                    assert same_bits(run.global_state(), before)
                else:
                    optimizer.step()
                if step % 2 == 1 and step != 3:
                    state = optimizer.state[model.weight]
                    k = float(state["step"])
                    corrected.append(float(state["exp_avg"][0, 0]) / (1 - 0.5**k))
        return corrected

    assert simulate(program, 2)[0] == pytest.approx([4.0] * 4, rel=1e-5)


# -- 9: weighted by the minibatches really done ------------------------------------------------------------------------
def uneven(rule: str, steps: list[int], **settings: Any) -> list[tuple[float, int]]:
    """Worker r makes steps[r] steps of +1 from 0, then closes; (final weight, blocks)."""

    def program() -> tuple[float, int]:
        with attached(nn.Linear(1, 1, bias=False).double(), rule, lr=1.0, **settings) as (run, model, optimizer):
            with torch.no_grad():
                model.weight.zero_()
            if run._state.blocks is not None:
                run._state.blocks.capture()
            for _ in range(steps[run.world.rank]):
                model.weight.grad = torch.full_like(model.weight, -1.0)
                optimizer.step()
        return float(model.weight.detach()), run.blocks

    return simulate(program, len(steps))


def test_law_9_the_last_block_counts_by_minibatches() -> None:
    # period 4: ranks did 4, 2 and 1 steps: (4*4 + 2*2 + 1*1) / 7
    assert uneven("averaging", [4, 2, 1], period=4) == [(21 / 7, 1)] * 3


def test_law_9_a_worker_without_data_has_no_say() -> None:
    assert uneven("averaging", [4, 0], period=4) == [(4.0, 1)] * 2
    assert uneven("averaging", [8, 2], period=4) == [((4 * 4 + 2 * 2) / 6 + 4, 2)] * 2


def test_law_9_an_idle_block_changes_nothing() -> None:
    assert uneven("bmuf", [0, 0], period=4) == [(0.0, 0)] * 2
    assert uneven("sync", [0, 0]) == [(0.0, 0)] * 2


@pytest.mark.parametrize("steps", [[3, 9], [9, 3], [3, 4], [5, 9], [5, 5], [0, 9]])
@pytest.mark.parametrize("rule", ["averaging", "bmuf"])
def test_law_9_workers_that_end_during_the_warm_up(steps: list[int], rule: str) -> None:
    found = uneven(rule, steps, period=2, warmup=5)
    assert len(set(found)) == 1
    assert found[0][0] > 0


def test_law_9_sync_with_unequal_steps_ends_equal() -> None:
    # both move +1 together three times; then rank 0 alone has a gradient, at full weight
    assert uneven("sync", [7, 3]) == [(7.0, 0)] * 2


def test_law_9_sync_weights_by_samples() -> None:
    """10 samples in batches of 4 over two workers: 4 + 4, then 1 + 1."""

    def program() -> list[float]:
        with attached(nn.Linear(1, 1, bias=False).double(), "sync", lr=1.0) as (run, model, optimizer):
            seen = []
            for batch in run.share(torch.arange(11.0).split(4)):
                optimizer.zero_grad()
                model.weight.grad = torch.full_like(model.weight, float(batch.mean()))
                optimizer.step()
                seen.append(float(model.weight.grad))
        return seen

    # round one: 0..3 and 4..7; the rest 8, 9, 10 is cut 2 + 1
    assert simulate(program, 2)[0] == pytest.approx([3.5, 9.0])


# -- 10: precision -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("dtype", "want"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
def test_law_10_outer_state_has_at_least_32_bits(dtype: torch.dtype, want: torch.dtype) -> None:
    def program() -> set[torch.dtype]:
        with attached(nn.Linear(4, 4).to(dtype), "bmuf_adam", adam, period=2) as (run, model, optimizer):
            for _ in range(2):
                for p in model.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
            assert run._state.blocks is not None
            found = {t.dtype for t in run._state.blocks.updates[0].state.tensors().values()}
            assert {p.dtype for p in run.model_for_export().parameters()} == {dtype}
        return found

    assert simulate(program, 2)[0] == {want}


@pytest.mark.parametrize(
    "rule", ["averaging(period=1)", "bmuf(period=1)", "diloco(period=1)", "bmuf(period=1, nesterov=False)"]
)
def test_law_10_the_rounding_of_a_16_bit_start_is_no_progress(rule: str) -> None:
    """When no worker moves, the momentum decays and nothing is added to it."""

    def program() -> list[bool]:
        with attached(nn.Linear(40, 10).to(torch.bfloat16), rule, period=1) as (run, model, optimizer):
            assert run._state.blocks is not None
            eta = run.rule.outer.momentum_at(1 << 30, 2)  # as in every block from the third on
            still = []
            for step in range(12):
                for p in model.parameters():
                    p.grad = torch.randn_like(p) if step < 4 else torch.zeros_like(p)
                before = {name: tensor.clone() for name, tensor in run._state.blocks.updates[0].state.tensors().items()}
                optimizer.step()
                if step >= 4:
                    for name, tensor in run._state.blocks.updates[0].state.tensors().items():
                        if "anchor" not in name:
                            still.append(torch.equal(tensor, before[name] * eta))
                        elif rule.startswith("averaging"):
                            still.append(torch.equal(tensor, before[name]))
        return still

    assert all(len(still) == 8 and all(still) for still in simulate(program, 2))


def test_law_10_bf16_training_converges_to_what_fp32_does() -> None:
    """Small steps vanish in bf16 parameters, but the mean of what did not vanish is kept in the anchor."""
    fine, coarse = (go(Case("bmuf(period=3)", sgd), 3, samples=96, dtype=t)[0] for t in (torch.float32, torch.bfloat16))
    assert max(float((fine.model[k] - coarse.model[k].float()).abs().max()) for k in fine.model) < 0.05
