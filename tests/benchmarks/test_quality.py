# SPDX-License-Identifier: Apache-2.0
"""The benchmark of quality: a trial of nothing is the package's own training, and its listener is sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.rules.schedule import Growth
from paceline_plugins.forecast import simulate_grown
from tests.benchmarks.modules import FOLDER, imported

NAMES = ("_quality_methods", "_quality_speech", "_quality_tasks", "_quality_times", "_quality_trials")
K, STEPS = 4, 64

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of the benchmark, which go out of sight again."""
    with imported(*NAMES) as found:
        yield found


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """A loss."""
    loss: Tensor = (model(x)[:, 0] - y).square().mean()
    return loss


def given(modules: dict[str, ModuleType], bias: bool = True) -> dict[str, Any]:
    """A small task."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1, bias=bias)
    x, y = torch.randn(K * STEPS, 2, 3), torch.randn(K * STEPS, 2)
    task = replace(modules["_quality_tasks"].TASKS["small-sgd"], loss=squares)
    rule = modules["_quality_methods"].Method.of("grown").rule(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return {"task": task, "model": model, "optimizer": optimizer, "rule": rule, "batches": zip(x, y, strict=True)}


def tried(modules: dict[str, ModuleType], of: dict[str, Any], **trial: Any) -> tuple[dict[str, Tensor], list[Any]]:
    """A training of a trial."""
    found: tuple[dict[str, Tensor], list[Any]] = modules["_quality_trials"].train_trial(
        of["task"], of["model"], of["optimizer"], of["rule"], of["batches"], K, Growth(), lambda done, k: 1.0, **trial
    )
    return found


def test_a_trial_of_nothing_is_the_packages_own_training(modules: dict[str, ModuleType]) -> None:
    of = given(modules)
    own = simulate_grown(
        of["model"], squares, of["optimizer"], of["rule"], of["batches"], K, growth=Growth(), rate=lambda done, k: 1.0
    )
    found, rows = tried(modules, given(modules))
    assert all(torch.equal(found[name], tensor) for name, tensor in own.parameters.items())
    assert [row[:2] for row in rows] == [[one.workers, one.minibatches] for one in own.stages]
    assert len(rows) == 2  # 2 workers, then 4


def test_where_the_model_is_one_tensor_its_diversity_is_that_of_the_model(modules: dict[str, ModuleType]) -> None:
    whole, _ = tried(modules, given(modules, bias=False))
    one, _ = tried(modules, given(modules, bias=False), tensors=True)
    assert torch.allclose(whole["weight"], one["weight"], rtol=1e-6)
    whole, _ = tried(modules, given(modules))
    two, _ = tried(modules, given(modules), tensors=True)
    assert not torch.allclose(whole["weight"], two["weight"], rtol=1e-4)


def test_periods_follow_a_law_and_each_is_timed_as_such(modules: dict[str, ModuleType]) -> None:
    of = given(modules)
    _, rows = tried(modules, of, law=1)
    assert sum(row[1] for row in rows) == K * STEPS
    assert {row[3] for row in rows} > {4}
    clock, task = modules["_quality_times"].Clock(0.25, 1_000_000, 1.0), of["task"]
    plain, short, long = (clock.seconds(task, "grown", [[K, 64, 1.0, *more]]) for more in ((), (2,), (8,)))
    assert long < plain < short
    assert plain == clock.seconds(task, "grown", [[K, 64, 1.0, 4]])


@pytest.mark.parametrize(("name", "outer"), [("diloco", "Nesterov"), ("averaging", "Average")])
def test_methods_to_compare_with(modules: dict[str, ModuleType], name: str, outer: str) -> None:
    rule = modules["_quality_methods"].Method.of(name).rule(modules["_quality_tasks"].TASKS["small-sgd"])
    assert (type(rule.outer).__name__, rule.schedule.period) == (outer, 4)
    if name == "diloco":
        c = rule.coefficients(1, 64, 0.0, 1.0)
        assert (c.momentum, c.lr) == (0.9, 0.7)


def test_what_is_behind_the_end_of_an_utterance_is_not_heard(modules: dict[str, ModuleType]) -> None:
    speech = modules["_quality_speech"]
    torch.manual_seed(0)
    model, times = speech.Filters(), torch.tensor([12, 20])
    heard = torch.randn(2, 20, speech.CEPSTRA)
    inside = (torch.arange(20) < times[:, None])[:, :, None]
    other = torch.where(inside, heard, torch.randn_like(heard))
    assert torch.equal(model(heard, times)[inside[..., 0]], model(other, times)[inside[..., 0]])


def test_cepstra_of_a_level_are_one_number_and_an_odd_step_is_one_more(modules: dict[str, ModuleType]) -> None:
    speech = modules["_quality_speech"]
    flat, times = speech.cepstra(torch.ones(1, 7, speech.FEATURES), torch.tensor([7]))
    assert flat.shape == (1, 20, speech.CEPSTRA)
    assert times.tolist() == [4]
    assert float(flat[0, 0, 0]) == pytest.approx(1.5 / 3.5 * 26**0.5)
    assert float(flat[0, 0, 1:].abs().max()) < 1e-5
