# SPDX-License-Identifier: Apache-2.0
"""Forgotten `run.share`, schedules over all workers' minibatches, loaders without batches."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, DistributedSampler, Subset

import paceline
from paceline.run import hooks
from tests.helpers import attached, learn, make_data, make_net, sgd, simulate

Batches = Iterable[Any]
Choose = Callable[[paceline.Run, DataLoader[Any]], Batches]


def train(run: paceline.Run, model: Any, optimizer: Any, batches: Batches, schedule: Any = None) -> None:
    for x, y in batches:
        learn(model, optimizer, x, y)
        if schedule is not None:
            schedule.step()


def said_of(program: Callable[[], None], workers: int = 2) -> list[str]:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    hooks.logger.addHandler(handler)
    try:
        simulate(program, workers)
    finally:
        hooks.logger.removeHandler(handler)
    return said


def one_epoch(choose: Choose, loader: Callable[[], Any] = lambda: DataLoader(make_data(), 4), **settings: Any) -> None:
    with attached(make_net(), "bmuf(period=4)", **settings) as (run, model, optimizer):
        train(run, model, optimizer, choose(run, loader()))


def bare(run: paceline.Run, loader: Any) -> Any:
    return loader


@pytest.mark.parametrize("choose", [bare, lambda run, loader: (batch for _, batch in enumerate(loader))])
def test_a_loader_that_is_not_shared_is_named_once(choose: Choose) -> None:
    said = said_of(partial(one_epoch, choose))
    assert len(said) == 1, said
    assert re.match(r"test_mistakes\.py:\d+: .* DataLoader of 48 samples that is not shared", said[0]), said
    assert "each of the 2 workers" in said[0] and "run.share(loader)" in said[0] and 'data="own"' in said[0]


LAST_BATCH: dict[str, tuple[str, str]] = {
    "of the own loader": ("sync", "len(loader)"),
    "of the shared one": ("sync", "len(run.share(loader))"),
    "of leased batches": ("asgd", "len(run.share(loader))"),
    "of an even split": ("asgd", "len(run.share(loader, even=True))"),
}


@pytest.mark.parametrize("kind", list(LAST_BATCH))
def test_a_test_for_the_last_batch(kind: str) -> None:
    """`i + 1 == len(..)` is so once a pass, or a warning names the line."""
    rule, length = LAST_BATCH[kind]
    last: list[int] = []

    def program() -> None:
        with attached(make_net(), rule) as (run, model, optimizer):
            loader = DataLoader(make_data(13), 1)
            shared = run.share(loader, even="even" in length)
            names = {"run": run, "loader": loader}
            for _ in range(2):
                for i, (x, y) in enumerate(shared):
                    learn(model, optimizer, x, y)
                    asked = len(loader) if kind == "of the own loader" else eval(length, names)
                    if i + 1 == asked:
                        last.append(run.world.rank)

    said = said_of(program, 3)
    if kind == "of the own loader":
        assert len(said) == 1 and re.match(r"test_mistakes\.py:\d+: .* has 5, so that .*len\(run.share", said[0]), said
    elif kind == "of leased batches":
        assert len(said) == 1 and "the length of a shared loader is that of an even split" in said[0], said
    else:
        assert not said and sorted(last) == [0, 0, 1, 1, 2, 2], said


def test_intended_or_shared_loaders_cause_no_warning() -> None:
    shared: Choose = lambda run, loader: run.share(loader)  # noqa: E731
    assert said_of(partial(one_epoch, shared)) == []
    assert said_of(partial(one_epoch, bare, data="own")) == []
    mine = lambda run, loader: DataLoader(  # noqa: E731
        make_data(), 4, sampler=DistributedSampler(make_data(), run.world.size, run.world.rank)
    )
    assert said_of(partial(one_epoch, mine)) == []
    assert said_of(partial(one_epoch, lambda run, loader: list(loader)[:3])) == []  # as a loop over random data
    assert said_of(partial(one_epoch, bare), workers=1) == []


def test_an_evaluation_goes_through_a_loader_of_its_own() -> None:
    def program() -> None:
        with attached(make_net(), "sync") as (run, model, optimizer):
            held_out = DataLoader(Subset(make_data(), range(12)), 4)
            for _ in range(2):
                for x, _y in held_out:
                    model(x)
                for x, y in run.share(DataLoader(make_data(), 4)):
                    train(run, model, optimizer, [(x, y)])
                    next(iter(held_out))

    assert said_of(program) == []


def test_data_is_shared_or_own() -> None:
    model = make_net()
    with pytest.raises(paceline.UnsupportedError, match='data must be "shared" or "own", got \'mine\''):
        paceline.attach(model, sgd(model.parameters()), data="mine")


EPOCHS = 3


def scheduled(make: Callable[[Any, int], Any], asks: bool = False) -> None:
    model = make_net()
    optimizer = sgd(model.parameters())
    loader = DataLoader(make_data(), 4)
    with paceline.attach(model, optimizer, "bmuf(period=4)") as run:
        steps = EPOCHS * len(run.share(loader) if asks else loader)
        schedule = make(optimizer, steps)
        for _ in range(EPOCHS):
            train(run, model, optimizer, run.share(loader), schedule)


def linear(step: int, *, num_training_steps: int) -> float:
    return 1 - step / num_training_steps


MAKES: dict[str, Callable[[Any, int], Any]] = {
    "T_max": lambda o, n: lr_scheduler.CosineAnnealingLR(o, T_max=n),
    "total_steps": lambda o, n: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=n),
    "total_iters": lambda o, n: lr_scheduler.PolynomialLR(o, total_iters=n),
    "milestones": lambda o, n: lr_scheduler.MultiStepLR(o, [n // 2, n]),
    "num_training_steps": lambda o, n: lr_scheduler.LambdaLR(o, partial(linear, num_training_steps=n)),
}


@pytest.mark.parametrize("name", MAKES)
def test_a_schedule_over_the_whole_loader_is_noticed_at_its_second_step(name: str) -> None:
    (said,) = said_of(partial(scheduled, MAKES[name]), workers=3)
    assert f"{name}=36, which is 3 x 12" in said and "a worker makes 4 of them" in said, said
    assert "comes only 33% of the way: count with len(run.share(loader))" in said


def test_right_schedules_are_left_alone() -> None:
    assert said_of(partial(scheduled, MAKES["T_max"], asks=True)) == []
    assert said_of(partial(scheduled, lambda o, n: lr_scheduler.ExponentialLR(o, 0.99))) == []

    def by_epochs() -> None:
        model = make_net()
        optimizer = sgd(model.parameters())
        schedule = lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
        with paceline.attach(model, optimizer, "bmuf(period=4)") as run:
            for _ in range(12):
                train(run, model, optimizer, run.share(DataLoader(make_data(32), 4)))
                schedule.step()

    assert said_of(by_epochs) == []


def shared(run: paceline.Run, loader: Any) -> Any:
    return run.share(loader)


def test_a_loader_without_batches_is_named_and_fewer_samples_than_workers_are_refused() -> None:
    assert all("no batch in an epoch" in text for text in said_of(partial(one_epoch, shared, list)))
    with pytest.raises(paceline.UnsupportedError, match=r"fewer samples than there are workers \(3\)"):
        said_of(partial(one_epoch, shared, lambda: DataLoader(make_data(2), 4)), workers=3)


def test_too_few_blocks_are_said_once_before_the_training() -> None:
    few = partial(one_epoch, shared, lambda: DataLoader(make_data(18), 2))
    (said,) = said_of(few, workers=3)
    assert said.startswith(
        "few blocks: 3 workers make 3 minibatches an epoch each, 1 block of bmuf(period=4), and need some 10: "
        "below 10 epochs take one worker, or period=1"
    )
    assert said_of(few, workers=1) == [] == said_of(partial(one_epoch, shared, lambda: DataLoader(make_data(), 4)))


def test_what_cannot_be_shared_or_logged_is_refused_by_name() -> None:
    with attached(make_net()) as (run, model, _):
        for wrong in (5, None, model):
            with pytest.raises(
                paceline.UnsupportedError, match=f"run.share takes a DataLoader.*{type(wrong).__name__}"
            ):
                run.share(wrong)  # type: ignore[arg-type]
        for value in ("abc", None, torch.ones(3)):
            with pytest.raises(paceline.UnsupportedError, match=r"run\.log\(loss=\.\.\) takes a number"):
                run.log(loss=value)  # type: ignore[arg-type]
        run.log(loss=torch.ones((), requires_grad=True))  # torch warns of its conversion
        with pytest.raises(paceline.UnsupportedError, match=r"restore takes what run\.snapshot\(\) gave, got a int"):
            run.restore(5)


def test_steps_after_the_end_and_moments_under_block_momentum_are_named_once() -> None:
    def program() -> None:
        model, batches = make_net(), [make_data().tensors] * 4
        with attached(model, "bmuf", torch.optim.Adam, period=2, data="own") as (run, _, optimizer):
            train(run, model, optimizer, batches)
        train(run, model, optimizer, batches)

    said = sorted(text for text in said_of(program) if "blocks in an epoch" not in text)
    assert ["Adam's own moments" in text for text in said] == [True, False, False], said
    assert ["after run.close()" in text for text in said] == [False, True, True]
