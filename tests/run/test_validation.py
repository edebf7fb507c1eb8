# SPDX-License-Identifier: Apache-2.0
"""What cannot work is refused, with words that say what and what to do."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline import MismatchError, UnsupportedError
from paceline.errors import CheckpointError
from paceline.flow import refuse_waiting
from tests.helpers import adam, attached, momentum_sgd, rank, sgd, simulate

RANK = r"\[rank \d of 2 on \S+\]"


def backward(model: nn.Module) -> None:
    model(torch.ones(2, 3)).sum().backward()


def refused(said: str, model: Any, optimizer: Any, rule: str = "bmuf", **settings: Any) -> None:
    with pytest.raises(UnsupportedError, match=said):
        paceline.attach(model, optimizer, rule, **settings)


def on_both(body: Callable[[], None], error: type[Exception], said: str) -> None:
    """Both workers raise `error`."""
    seen = []

    def program() -> None:
        with pytest.raises(error, match=said):
            body()
        seen.append(rank())

    simulate(program, 2)
    assert sorted(seen) == [0, 1]


# -- at attach ---------------------------------------------------------------------------------------------------------
def test_other_objects_as_optimizers_are_refused() -> None:
    model = nn.Linear(3, 1)
    refused("must be a torch.optim.Optimizer or a list of them, got dict", model, {})
    refused("list of optimizers is empty", model, [])


def test_other_objects_as_models_are_refused() -> None:
    refused("model must be a torch.nn.Module", [nn.Linear(1, 1), 3], sgd(nn.Linear(1, 1).parameters()))


def test_attached_twice() -> None:
    with attached(nn.Linear(3, 1), "bmuf") as (_, model, optimizer):
        refused("attached already; close that run", model, optimizer)
    paceline.attach(model, optimizer, "bmuf").close()


@pytest.mark.parametrize(
    "rule", ["bmuf(grow='auto')", "bmuf_adam(grow='2:8')", "auto(grow='auto')", "diloco(grow='2:8')"]
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_number_of_workers_that_grows_where_all_are_there(rule: str, workers: int) -> None:
    def program() -> None:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(model.parameters())
        refused("of this run is fixed, and grow= needs .* or leave grow out", model, optimizer, rule)
        paceline.attach(model, optimizer, "bmuf").close()

    simulate(program, workers)


@pytest.mark.parametrize(("growth", "workers"), [(None, 4), ({"workers": 4}, 4), ({"workers": 2}, 4)])
def test_a_checkpoint_of_workers_that_waited_is_refused(growth: dict[str, int] | None, workers: int) -> None:
    waits = growth is not None and growth["workers"] < workers
    with pytest.raises(CheckpointError, match="while 2 of 4 workers trained") if waits else contextlib.nullcontext():
        refuse_waiting(growth, workers)


def test_two_runs_over_one_parameter() -> None:
    model = nn.Linear(3, 1)
    refused("is in two optimizers", model, [sgd(model.parameters()), sgd([model.weight])])


def test_a_parameter_that_the_model_lacks() -> None:
    model, other = nn.Linear(3, 1), nn.Linear(2, 5)
    refused(
        r"SGD holds a parameter of shape \(5, 2\) that the model does not have",
        model,
        sgd([*model.parameters(), *other.parameters()]),
    )


def test_nothing_to_train() -> None:
    model = nn.Linear(3, 1).requires_grad_(False)
    refused("no parameter of the model both requires a gradient", model, sgd(model.parameters()))


def test_wrapped_models() -> None:
    model = nn.DataParallel(nn.Linear(3, 1))
    refused(r"wrapped in DataParallel.*model\.module", model, sgd(model.parameters()))


def test_lazy_and_meta_parameters() -> None:
    lazy = nn.Sequential(nn.Linear(3, 2), nn.LazyLinear(1))
    refused("1.weight is a lazy parameter", lazy, sgd(lazy.parameters()))
    meta = nn.Linear(3, 1, device="meta")
    refused("weight lies on the meta device", meta, sgd(meta.parameters()))


@pytest.mark.parametrize("rule", ["sync", "bmuf(warmup=3)"])
def test_optimizers_that_compute_their_own_gradients(rule: str) -> None:
    model = nn.Linear(3, 1)
    refused("LBFGS computes gradients inside its step", model, torch.optim.LBFGS(model.parameters()), rule)
    refused("SparseAdam wants sparse gradients", model, torch.optim.SparseAdam(model.parameters()), rule)


def test_settings() -> None:
    model = nn.Linear(3, 1)
    optimizer = sgd(model.parameters())
    refused('outer_state must be "device" or "host", got \'disk\'', model, optimizer, outer_state="disk")
    refused("timeout_s must be a number of seconds above 0, got 0", model, optimizer, timeout_s=0)
    refused("seed must be a whole number, got '3'", model, optimizer, seed="3")
    with pytest.raises(paceline.RuleError, match="bmuf has no setting 'perod'"):
        paceline.attach(model, optimizer, "bmuf", perod=3)


@pytest.mark.parametrize(("given", "meant"), [("seeed", "seed"), ("chekpoint", "checkpoint"), ("gard", "guard")])
def test_a_misspelt_option_is_named(given: str, meant: str) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(paceline.RuleError, match=f"no setting '{given}'.*did you mean '{meant}'"):
        paceline.attach(model, sgd(model.parameters()), "bmuf", **{given: 1})


def test_included_objects_need_a_state() -> None:
    with attached(nn.Linear(3, 1), "bmuf") as (run, *_):
        with pytest.raises(UnsupportedError, match="thing is a int, which has no state_dict"):
            run.include(thing=3)


# -- across workers ----------------------------------------------------------------------------------------------------
def with_buffer(rows: int) -> nn.Module:
    """Buffers travel too, so their shapes have to agree as well."""
    model = nn.Linear(3, 1)
    model.register_buffer("table", torch.zeros(rows))
    return model


def half_frozen(trained: bool) -> nn.Module:
    model = nn.Linear(3, 1)
    model.bias.requires_grad_(trained)
    return model


DIFFERENT: dict[str, tuple[Callable[[int], nn.Module], Callable[[int], dict[str, Any]], str]] = {
    "shapes": (
        lambda k: nn.Linear(3, 1 + k),
        lambda k: {},
        rf"rank 0 on \S+ has weight of shape \(1, 3\).*rank 1 on \S+ has .*\(2, 3\).*{RANK}",
    ),
    "depths": (
        lambda k: nn.Sequential(*(nn.Linear(3, 3) for _ in range(1 + k))),
        lambda k: {},
        "has 2 tensors, rank 1 on .* 4",
    ),
    "dtypes": (lambda k: nn.Linear(3, 1).to((torch.float32, torch.float64)[k]), lambda k: {}, "float32.*float64"),
    "buffers": (lambda k: with_buffer(2 + k), lambda k: {}, "table"),
    "frozen parts": (lambda k: half_frozen(k == 0), lambda k: {}, "has"),
    "rules": (
        lambda k: nn.Linear(3, 1),
        lambda k: {"period": 4 + k},
        r"rank 0 on \S+ runs the rule bmuf\(period=4\) and rank 1 on \S+ bmuf\(period=5\)",
    ),
    "seeds": (lambda k: nn.Linear(3, 1), lambda k: {"seed": k}, "seed=0 and rank 1 on .* 1"),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_workers_that_differ(what: str) -> None:
    make, settings, said = DIFFERENT[what]

    def body() -> None:
        model = make(rank())
        paceline.attach(model, sgd(model.parameters()), "bmuf", **settings(rank()))

    on_both(body, MismatchError, said)


def test_different_kinds_of_optimizer() -> None:
    """Compensated moments of SGD and of Adam have different shapes on the wire; attach has to say so."""

    def body() -> None:
        model = nn.Linear(3, 1)
        optimizer = (adam if rank() else momentum_sgd)(model.parameters())
        with paceline.attach(model, optimizer, "bmuf", local_state="average", period=1):
            backward(model)
            optimizer.step()

    on_both(body, MismatchError, "SGD.*Adam|optimizer")


class ScheduleFree(torch.optim.SGD):
    """Between eval() and train() the model has other weights, which follow from the state."""

    def train(self) -> None: ...
    def eval(self) -> None: ...


@pytest.mark.parametrize("rule", ["auto", "bmuf", "bmuf(warmup=4)", "averaging", "asgd", "easgd"])
def test_an_optimizer_that_swaps_the_models_weights(rule: str) -> None:
    def body() -> None:
        model = nn.Linear(3, 1)
        paceline.attach(model, ScheduleFree(model.parameters(), lr=0.1), rule)

    on_both(body, UnsupportedError, r'ScheduleFree.*eval\(\).*take the rule "sync"')


def test_an_optimizer_that_swaps_weights_alone_and_in_synchronous_steps() -> None:
    def body() -> None:
        model = nn.Linear(3, 1)
        with paceline.attach(model, optimizer := ScheduleFree(model.parameters(), lr=0.1), "sync"):
            backward(model)
            optimizer.step()

    simulate(body, 2)
    model = nn.Linear(3, 1)
    paceline.attach(model, ScheduleFree(model.parameters(), lr=0.1), "auto").close()


# -- later -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["sync", "bmuf(period=1)"])
@pytest.mark.parametrize(
    ("frozen", "said"),
    [
        (False, r"SGD had 2 trainable parameters at attach and has 3 now \(1 new, 0 gone.*make a new optimizer"),
        (True, "0 new, 1 gone or frozen"),
    ],
)
def test_parameters_added_or_frozen_after_attach(rule: str, frozen: bool, said: str) -> None:
    def body() -> None:
        with attached(nn.Linear(3, 1), rule) as (_, model, optimizer):
            if frozen:
                model.bias.requires_grad_(False)
            else:
                optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
            backward(model)
            optimizer.step()

    on_both(body, UnsupportedError, said)


def test_a_model_that_changes_its_shape() -> None:
    def body() -> None:
        model = nn.Linear(3, 1)
        optimizer = sgd(model.parameters())
        paceline.attach(model, optimizer, "bmuf", period=1)
        model.weight.data = torch.zeros(1, 4)
        optimizer.step()

    with pytest.raises(UnsupportedError, match="must keep its shape"):  # where the run ends, too
        on_both(body, UnsupportedError, "must keep its shape")


def test_sparse_gradients_are_fine_in_blocks() -> None:
    def body() -> torch.Tensor:
        with attached(nn.Embedding(5, 2, sparse=True), "averaging", period=1) as (_, model, optimizer):
            model(torch.tensor([rank()])).sum().backward()
            optimizer.step()
        return model.weight.detach()

    one, other = simulate(body, 2)
    assert torch.equal(one, other)


def test_a_closure_under_sync() -> None:
    def body() -> None:
        with attached(nn.Linear(3, 1), "sync") as (_, model, optimizer):
            optimizer.step(lambda: backward(model))

    on_both(body, UnsupportedError, rf"SGD\.step\(closure\) computes gradients inside the step.*{RANK}")


def test_lbfgs_in_blocks() -> None:
    def body() -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(3, 1)
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
        with paceline.attach(model, optimizer, "averaging", period=2):
            x = torch.randn(8, 3) + rank()

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss: torch.Tensor = (model(x) - 1).square().mean()
                loss.backward()
                return loss

            for _ in range(4):
                optimizer.step(closure)
        return model.weight.detach()

    one, other = simulate(body, 2)
    assert torch.equal(one, other) and bool(torch.isfinite(one).all())


def test_copying_an_attached_model_is_allowed() -> None:
    def body() -> float:
        with attached(nn.Linear(3, 1), "bmuf") as (_, model, _):
            twin = copy.deepcopy(model)
        return float(twin.weight.detach().sum() - model.weight.detach().sum())

    assert simulate(body, 2) == [0.0, 0.0]


def test_optimizers_that_a_rule_cannot_serve() -> None:
    model = nn.Linear(3, 1)
    refused("the optimizer is SGD", model, sgd(model.parameters()), "bmuf_adam")
    refused("the optimizer is RMSprop", model, torch.optim.RMSprop(model.parameters()), "bmuf_adam")
    refused("running maximum", model, torch.optim.Adam(model.parameters(), amsgrad=True), "bmuf_adam")
    refused("not for RMSprop", model, torch.optim.RMSprop(model.parameters()), "bmuf", local_state="compensate")


def test_workers_at_different_places_of_the_program() -> None:
    """One trains its two parts in the other order."""

    def body() -> None:
        model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        pair = [sgd(model[0].parameters()), sgd(model[1].parameters())]
        paceline.attach(model, pair, "sync")
        for number in (0, 1) if rank() == 0 else (1, 0):
            backward(model[number])
            pair[number].step()

    on_both(body, MismatchError, "different places of the program")
