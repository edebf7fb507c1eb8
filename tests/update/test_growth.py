# SPDX-License-Identifier: Apache-2.0
"""A number of workers that grows among N that are there, on virtual workers."""

from __future__ import annotations

import logging
import shutil
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, TensorDataset

import paceline
from paceline.errors import ElsewhereError, UnsupportedError
from paceline.forecast.sim import Clock
from paceline.rules.recipes import make_rule
from paceline_plugins.forecast import simulate_grown
from tests.forecast.sim.test_vectorised import loss_of
from tests.helpers import adam, distance, make_net, momentum_sgd, same_bits, sgd, simulate
from tests.processes.grown_programs import Grown, Seen, training

AT_ONCE = "auto(threshold=0.01, blocks=2)"
"""Grows as soon as it is measured what the workers are worth."""


def once_an_epoch(found: list[Seen], samples: int, epochs: int) -> bool:
    """Whether each sample of each epoch was given to one worker."""
    given = Counter((epoch, number) for seen in found for epoch, _, numbers, *_ in seen.batches for number in numbers)
    return given == {(epoch, number): 1 for epoch in range(epochs) for number in range(samples)}


def stages(seen: Seen) -> list[int]:
    """k of this worker's steps, each once."""
    return list(dict.fromkeys(k for _, k, *_ in seen.batches))


# -- data --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [2, 3, 5, 8])
@pytest.mark.parametrize("grow", [AT_ONCE, "1:10, 2:40, 3:90", "2:37"])
def test_every_sample_goes_to_one_worker_in_each_epoch(workers: int, grow: str) -> None:
    """Whatever the number of workers, the stages, and the last, uneven round are."""
    for samples, merge in ((131, False), (64, True), (8 * workers + 3, False)):
        found = simulate(Grown(f"bmuf(period=3, grow='{grow}')", samples, merge=merge, norm=False), workers)
        assert once_an_epoch(found, samples, 2)
        assert all(same_bits(seen.model, found[0].model) for seen in found)
        joined = [seen for seen in found if seen.batches]
        assert [stages(seen)[-1] for seen in joined] == [found[0].workers] * len(joined)


class Pairs(BatchSampler):
    """Batches of neighbours, in an order of its own."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return -(-self._count // 2)

    def __iter__(self) -> Any:
        for place in torch.randperm(len(self)).tolist():
            yield list(range(2 * place, min(self._count, 2 * place + 2)))


def counted(make: Callable[[Dataset[Any]], Any], samples: int, grow: str) -> list[float]:
    """A model whose weight i says how often sample i is in it: all k workers' steps are summed."""
    model = nn.Linear(samples, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    # a worker's rate is k, and the mean over k workers gives it back
    rule = f"bmuf(period=2, momentum=0.0, lr=1.0, rate_exponent=1, grow='{grow}')"
    run = paceline.attach(model, optimizer, rule, guard=None)
    share = run.share(make(TensorDataset(torch.eye(samples))))
    for _ in range(2):
        for (rows,) in share:
            optimizer.zero_grad()
            (-model(rows)).sum().backward()
            optimizer.step()
    run.close()
    return [round(float(number), 4) for number in model.weight.detach().flatten()]


LOADERS: dict[str, Callable[[Dataset[Any]], Any]] = {
    "shuffled": lambda data: DataLoader(data, 2, shuffle=True),
    "batches of its own": lambda data: DataLoader(data, batch_sampler=Pairs(len(data))),  # type: ignore[arg-type]
    "a list": lambda data: [[data[i : i + 2][0]] for i in range(0, len(data), 2)],  # type: ignore[arg-type, index]
    "an iterable": lambda data: Made(data),
}


class Made:
    """An iterable without a length."""

    def __init__(self, data: Any) -> None:
        self._data = data

    def __iter__(self) -> Any:
        return ([self._data[i : i + 2][0]] for i in range(0, len(self._data), 2))


@pytest.mark.parametrize("kind", list(LOADERS))
@pytest.mark.parametrize("workers", [2, 3, 6])
def test_every_sample_is_in_the_model_once_an_epoch(kind: str, workers: int) -> None:
    """Each kind of data, by a model that counts, where all rounds are full."""
    for grow in ("1:6, 2:16", "2:24", "3:24"):
        for weights in simulate(partial(counted, LOADERS[kind], 72, grow), workers):
            assert weights == [2.0] * 72, (grow, weights)


def test_two_loaders_that_are_gone_through_together_change_together() -> None:
    def program() -> list[tuple[list[int], list[int]]]:
        model, numbers = make_net(), torch.arange(48)
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=2, grow='1:4, 2:12')") as run:
            one = run.share(DataLoader(TensorDataset(numbers), 2, shuffle=True))
            other = run.share(DataLoader(TensorDataset(numbers), 3, shuffle=True))
            found = []
            for (a,), (b,) in zip(one, other, strict=False):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                found.append((a.tolist(), b.tolist()))
        return found

    found = simulate(program, 4)
    for number, expected in ((0, 32), (1, 48)):  # the first has batches for longer
        given = Counter(i for rows in found for row in rows for i in row[number])
        assert set(given.values()) == {1} and len(given) == expected
    assert [len(rows) for rows in found] == [9, 5, 1, 1]


def test_an_evaluation_is_split_among_all_and_one_within_training_among_those_that_train() -> None:
    def program() -> list[tuple[str, int]]:
        model = make_net()
        optimizer = sgd(model.parameters())
        data = DataLoader(TensorDataset(torch.arange(24)), 2, shuffle=True)
        held = DataLoader(TensorDataset(torch.arange(40)), 2, shuffle=True)
        found: list[tuple[str, int]] = []
        with paceline.attach(model, optimizer, "bmuf(period=2, grow='2:1000')") as run:
            train, evaluate = run.share(data), run.share(held)

            def look(when: str) -> None:
                with torch.no_grad():
                    found.extend((when, int(i)) for (batch,) in evaluate for i in batch)

            for _ in range(2):
                look("between")
                for step, _ in enumerate(train):
                    optimizer.zero_grad()
                    model(torch.randn(4, 6)).square().mean().backward()
                    optimizer.step()
                    if step == 2:
                        look("within")
            look("between")
        return found

    found = simulate(program, 4)
    given = Counter(one for rows in found for one in rows)
    assert given == {("between", i): 3 for i in range(40)} | {("within", i): 2 for i in range(40)}
    assert [len(rows) for rows in found] == [70, 70, 30, 30]


def test_a_pass_that_is_left_early_ends_for_those_that_wait() -> None:
    def program() -> tuple[int, int, int]:
        model = make_net()
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=2, grow='2:24')") as run:
            share = run.share(DataLoader(TensorDataset(torch.arange(48)), 2))
            rounds = 0
            while run.minibatches < 12:
                rounds += 1
                for _ in share:
                    optimizer.zero_grad()
                    model(torch.randn(4, 6)).square().mean().backward()
                    optimizer.step()
                    if run.minibatches % 5 == 0:
                        break
            found = rounds, run.minibatches, run.epoch
        return found

    assert simulate(program, 4) == [(3, 15, 2)] * 4


# -- numbers -----------------------------------------------------------------------------------------


def test_mean_gain_and_rate_follow_those_that_train() -> None:
    """By hand: gradient r on worker r, so the mean of k workers is (k - 1) / 2, and the rate is k."""

    def program() -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        rule = "bmuf(period=1, gain=1.0, momentum=0.0, rate_exponent=1, grow='2:4')"
        found = []
        with paceline.attach(model, optimizer, rule, guard=None) as run:
            for _ in run.share([torch.zeros(1)] * 16):
                model.weight.grad = torch.full_like(model.weight, run.world.rank)
                optimizer.step()
                found.append(round(model.weight.item(), 4))
        return found

    found = simulate(program, 4)
    assert found[0] == [-1.0, -2.0, -8.0, -14.0, -20.0]  # 0.5 * 2 twice, then 1.5 * 4
    assert found[3] == found[0][2:]


def test_the_outer_step_of_k_workers_has_their_gain() -> None:
    rule = make_rule("bmuf(period=1)", {})
    seen = []

    def program() -> None:
        model = make_net()
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=1, grow='2:4')") as run:
            for _ in run.share(DataLoader(TensorDataset(torch.arange(32)), 2)):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                numbers = run._engine.blocks.updates[0].numbers  # type: ignore[union-attr]
                if run.world.rank == 0:
                    seen.append((numbers.block, training(run), numbers.coefficients().momentum))

    simulate(program, 8)
    assert [k for _, k, _ in seen] == [2, 2, 8, 8]
    assert [momentum for _, _, momentum in seen] == [
        rule.coefficients(block + 1, k, 0).momentum for block, k, _ in seen
    ]


def test_schedules_follow_the_samples() -> None:
    """At each round of N workers the schedule is where it is with N workers; a worker that begins takes it over."""
    found = simulate(Grown("bmuf(period=2, grow='1:10, 2:26')", 128, epochs=1, merge=False), 4)
    k_and_step = [(k, step) for _, k, _, step, _ in found[0].batches]
    assert [step for k, step in k_and_step if k == 1] == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert [step for k, step in k_and_step if k == 2] == [2, 3, 3, 4, 4, 5, 5, 6]
    assert [step for k, step in k_and_step if k == 4] == [6, 7]
    assert [step for _, _, _, step, _ in found[3].batches] == [6, 7]
    assert {tuple(seen.rates) for seen in found} == {(0.05 / (1 + 0.05 * 8),)}
    factor = 4**0.29
    assert found[3].batches[0][4] == pytest.approx(factor * 0.05 / (1 + 0.05 * 6))


def test_a_schedule_of_fixed_length_does_not_run_out_and_an_unknown_one_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def program(named: bool) -> int:
        model = make_net()
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=2, grow='1:40')") as run:
            share = run.share(DataLoader(TensorDataset(torch.arange(103)), 2))
            total = 2 * len(share)
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 0.1, total_steps=total + (0 if named else 200), cycle_momentum=False
            )
            if named:
                run.include(schedule=schedule)
            for _ in range(2):
                for _ in share:
                    optimizer.zero_grad()
                    model(torch.randn(4, 6)).square().mean().backward()
                    optimizer.step()
                    schedule.step()
            return total - schedule.last_epoch

    with caplog.at_level(logging.WARNING):
        assert simulate(partial(program, True), 4) == [0] * 4
        assert "it follows the samples" not in caplog.text
        simulate(partial(program, False), 4)
    assert caplog.text.count("it follows the samples") == 1


RULES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], int]] = {
    "bmuf(period=2, grow='2:8, 4:24')": (sgd, 72),
    "bmuf(period=3, grow='1:9, 3:30')": (momentum_sgd, 68),
    "bmuf_adam(period=2, grow='1:8, 2:16, 4:48')": (adam, 72),
    "averaging(period=2, grow='2:16, 4:48')": (adam, 72),
    "diloco(period=2, grow='2:16, 6:40')": (adam, 72),
}
"""Rule -> optimizer, and minibatches that all workers make in full steps."""


@pytest.mark.parametrize("rule", RULES)
def test_it_is_what_stacked_workers_that_grow_give(rule: str) -> None:
    make, number = RULES[rule]
    inputs, targets = torch.randn(number, 4, 6), torch.randint(3, (number, 4))
    minibatches = list(zip(inputs.unbind(), targets.unbind(), strict=True))

    def program() -> dict[str, torch.Tensor]:
        model = make_net()
        optimizer = make(model.parameters())
        with paceline.attach(model, optimizer, rule, guard=None) as run:
            for x, y in run.share(minibatches):
                optimizer.zero_grad()
                loss_of(model, x, y).backward()
                optimizer.step()
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    found, model = simulate(program, 8), make_net()
    stacked = simulate_grown(model, loss_of, make(model.parameters()), rule, minibatches, 8)
    assert len(stacked.stages) >= 3 and sum(stage.minibatches for stage in stacked.stages) == len(minibatches)
    assert distance(found[0], stacked.parameters) < 1e-5


# -- laws --------------------------------------------------------------------------------------------

RESUMED = [
    "bmuf(period=2, grow='2:14')",
    "bmuf_adam(period=3, grow='1:6, 2:18')",
    f"averaging(period=2, grow='{AT_ONCE}')",
]


@pytest.mark.parametrize("rule", RESUMED)
def test_a_run_that_stops_anywhere_goes_on_with_the_same_bits(rule: str, tmp_path: Path) -> None:
    make = momentum_sgd if rule.startswith("bmuf(") else adam
    program = partial(Grown, rule, 72, epochs=2, optimizer=make)
    whole = simulate(program(place=tmp_path / "whole"), 4)
    assert once_an_epoch(whole, 72, 2) and all(same_bits(seen.model, whole[0].model) for seen in whole)
    steps = sorted((tmp_path / "whole").glob("step-*"))
    assert len(steps) >= 6
    for step in [*steps[:5], *steps[5::3]]:
        place = tmp_path / "again" / step.name
        shutil.copytree(step, place / step.name)
        again = simulate(program(place=place, every=1000), 4)
        for one, other in zip(whole, again, strict=True):
            assert same_bits(one.model, other.model), step.name
            assert one.rates == other.rates and one.batches[len(one.batches) - len(other.batches) :] == other.batches


def test_the_same_seed_gives_the_same_bits() -> None:
    program = Grown(f"bmuf_adam(period=2, grow='{AT_ONCE}')", 131)
    one, other = simulate(program, 4), simulate(program, 4)
    assert [seen.batches for seen in one] == [seen.batches for seen in other]
    assert same_bits(one[0].model, other[0].model)


def test_another_number_of_workers_goes_on_with_the_same_samples(tmp_path: Path) -> None:
    program = partial(Grown, "bmuf(period=2, grow='2:26')", 104, epochs=2, merge=False)
    simulate(program(place=tmp_path / "whole"), 4)
    steps = sorted((tmp_path / "whole").glob("step-*"))
    for step in (steps[2], steps[6], steps[-2]):
        for workers in (2, 3):
            place = tmp_path / f"{step.name} {workers}"
            shutil.copytree(step, place / step.name)
            again = simulate(program(place=place, every=1000), workers)
            given = Counter(
                (epoch, number) for seen in again for epoch, _, numbers, *_ in seen.batches for number in numbers
            )
            assert set(given.values()) == {1} and len(given) <= 208
            assert all(same_bits(seen.model, again[0].model) for seen in again)


def test_the_period_follows_measured_times_while_workers_wait() -> None:
    """By a simulated clock: those that wait have measured nothing, and change the period with the others."""
    rule, slow = "auto(probe=0, share=1e-6, longest=12, grow='1:20, 2:80')", Clock(compute=1.0, network=1000.0)
    found = [seen for seen in paceline.simulate(Grown(rule, 411), 4, clock=slow) if seen is not None]
    assert once_an_epoch(found, 411, 2) and [seen.period for seen in found] == [12] * 4
    assert stages(found[0]) == [1, 2, 4] and all(same_bits(seen.model, found[0].model) for seen in found)


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        ("bmuf(period=4, overlap=2, grow='2:8')", "leave overlap out"),
        ("bmuf(period=4, fragments=2, grow='2:8')", "leave fragments out"),
        ("bmuf(period=4, warmup=3, grow='2:8')", "leave warmup out"),
    ],
)
def test_what_growth_does_not_serve_is_refused_at_attach(rule: str, why: str) -> None:
    def program() -> None:
        model = make_net()
        paceline.attach(model, sgd(model.parameters()), rule)

    with pytest.raises(UnsupportedError, match=why):
        simulate(program, 2)


def test_a_step_outside_of_a_shared_pass_is_refused() -> None:
    def program() -> None:
        model = make_net()
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=4, grow='2:8')", data="own"):
            model(torch.randn(4, 6)).sum().backward()
            optimizer.step()

    with pytest.raises(UnsupportedError, match="outside of a pass over"):
        simulate(program, 4)


def test_betas_that_a_schedule_changes_are_refused_where_moments_are_compensated() -> None:
    """Where beta1 is lowered it stays so, whatever the schedule writes."""

    def program(beta1: str) -> None:
        model = make_net()
        optimizer = adam(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)
        with paceline.attach(model, optimizer, f"bmuf_adam(period=2, beta1={beta1}, grow='2:8')") as run:
            run.include(schedule=schedule)
            for _ in run.share(DataLoader(TensorDataset(torch.arange(64)), 2)):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                schedule.step()

    simulate(partial(program, "0.5"), 4)
    with pytest.raises(UnsupportedError, match="cycle_momentum=False"):
        simulate(partial(program, "None"), 4)


def test_a_call_of_those_that_train_alone_is_named(tmp_path: Path) -> None:
    def program() -> None:
        model = make_net()
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=2, grow='2:80')") as run:
            for _ in run.share(DataLoader(TensorDataset(torch.arange(64)), 2)):
                optimizer.zero_grad()
                model(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                run.save(tmp_path / "saved")

    with pytest.raises(ElsewhereError, match="waiting while few workers train"):
        simulate(program, 4)


def test_a_program_that_counts_the_batches_of_all_workers_is_told_what_it_left_out() -> None:
    def program() -> None:
        model = make_net()
        optimizer = sgd(model.parameters())
        with paceline.attach(model, optimizer, "bmuf(period=2, grow='2:80')") as run:
            share = run.share(DataLoader(TensorDataset(torch.arange(64)), 2))
            for _ in range(2):
                for _, _ in zip(range(len(share)), share, strict=False):
                    optimizer.zero_grad()
                    model(torch.randn(4, 6)).square().mean().backward()
                    optimizer.step()

    with pytest.raises(UnsupportedError, match="50% of the samples were left out"):
        simulate(program, 4)
