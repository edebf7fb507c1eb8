# SPDX-License-Identifier: Apache-2.0
"""The benchmark of quality: its times, the methods to compare with, and its listener are sound."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.benchmarks.modules import FOLDER, imported

NAMES = ("_quality_methods", "_quality_speech", "_quality_tasks", "_quality_times")
K = 4

if not FOLDER.is_dir():
    pytest.skip("the benchmarks are not beside the package", allow_module_level=True)


@pytest.fixture(scope="module")
def modules() -> Iterator[dict[str, ModuleType]]:
    """Modules of the benchmark, which go out of sight again."""
    with imported(*NAMES) as found:
        yield found


def test_blocks_of_fewer_minibatches_take_longer(modules: dict[str, ModuleType]) -> None:
    clock, task = modules["_quality_times"].Clock(0.25, 1_000_000, 1.0), modules["_quality_tasks"].TASKS["small-sgd"]
    short, plain, long = (clock.seconds(task, f"grown{p}", [[K, 64, 1.0]]) for p in ("-period=2", "", "-period=8"))
    assert long < plain < short


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
