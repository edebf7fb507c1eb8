# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of asynchronous runs: on the simulated clock, who resumes goes on with the bits of who went on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import paceline
from paceline.forecast.sim import Clock, link, uniform
from tests.helpers import Program, adam, attached, make_net, momentum_sgd, rank, same_bits, sgd
from tests.update.server.programs import RECIPES, Numbers, simulate

FULL: dict[str, Any] = {"dropout": 0.3, "norm": True, "schedule": True, "samples": 50, "epochs": 3}


def nadam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.NAdam(params, lr=0.01)


def adagrad(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(params, lr=0.05, initial_accumulator_value=0.1)


CASES: list[tuple[str, Callable[[Any], torch.optim.Optimizer]]] = [
    *((rule, momentum_sgd) for rule in RECIPES),
    *(("asgd()", kind) for kind in (sgd, adam, nadam, adagrad)),
    ("asgd(period=4)", adam),
    ("dc_asgd(kind='adaptive')", adam),
    ("dc_asgd(kind='normalized', start=0.9)", momentum_sgd),
    ("easgd(period=3)", adam),
    ("ssp(staleness=1)", adam),
]


@pytest.mark.parametrize(("rule", "optimizer"), CASES, ids=[f"{rule}-{kind.__name__}" for rule, kind in CASES])
def test_stop_and_resume(rule: str, optimizer: Callable[[Any], torch.optim.Optimizer], tmp_path: Path) -> None:
    """5 steps an epoch; 7 is in the middle of an epoch and of a block."""
    choices: dict[str, Any] = {"optimizer": optimizer, **FULL}
    went_on = simulate(Program(rule, **choices, save_at=7, save_to=tmp_path / "c"), 3)
    resumed = simulate(Program(rule, **choices, resume=tmp_path / "c"), 3)
    for one, other in zip(resumed, went_on, strict=True):
        assert one.losses == other.losses[7:]
        assert one.minibatches == other.minibatches == 15
        assert same_bits(one.model, other.model)
    assert load_file(tmp_path / "c" / "global.safetensors").keys() == went_on[0].model.keys()


@pytest.mark.parametrize("rule", RECIPES[::2])
def test_stop_and_resume_where_fast_workers_get_more(rule: str, tmp_path: Path) -> None:
    choices: dict[str, Any] = {"optimizer": momentum_sgd, **FULL, "even": False}
    speeds: dict[str, Any] = {"clock": Clock([1.0, 0.4, 0.7])}
    went_on = simulate(Program(rule, **choices, save_at=7, save_to=tmp_path / "c"), 3, **speeds)
    resumed = simulate(Program(rule, **choices, resume=tmp_path / "c"), 3, **speeds)
    for one, other in zip(resumed, went_on, strict=True):
        assert one.losses == other.losses[7:]
        assert one.minibatches == other.minibatches
        assert same_bits(one.model, other.model)
    assert len({one.minibatches for one in went_on}) > 1


@pytest.mark.parametrize("seed", [2, 3, 4, 5])
def test_the_clock_is_saved_when_all_have_come_to_rest(seed: int, tmp_path: Path) -> None:
    """Latencies longer than minibatches: the workers get the answers that they save at different times."""
    choices: dict[str, Any] = {"optimizer": momentum_sgd, **FULL}

    def clock() -> Clock:
        return Clock(uniform(), lambda source, to, nbytes, generator: generator.uniform(0.0, 3.0), seed)

    went_on = simulate(Program("asgd(piece=64)", **choices, save_at=7, save_to=tmp_path / "c"), 3, clock())
    resumed = simulate(Program("asgd(piece=64)", **choices, resume=tmp_path / "c"), 3, clock())
    assert [o.losses for o in resumed] == [o.losses[7:] for o in went_on]


# -- what a save waits for ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rule", ["asgd()", "asgd(overlap=0)", "asgd(period=2)", "ssp(staleness=3)"])
def test_a_save_waits_for_all_that_is_under_way(rule: str, tmp_path: Path) -> None:
    """Pushes that take 5 minibatches are in it, and what was gathered meanwhile; all see the same global model."""

    def program() -> tuple[float, float, int, int]:
        with attached(Numbers(200), rule, lr=1.0) as (run, model, optimizer):
            for _ in range(6):
                model.p.grad = torch.full((200,), -1.0)
                optimizer.step()
            run.save(tmp_path / "c")
            seen = run.global_state()["p"]
            assert bool((seen == seen[0]).all())
            pushes = run.blocks
        return float(seen[0]), model.value, pushes, run.blocks

    found = simulate(program, 3, Clock(uniform(), link(2.5), seed=1))
    saved = load_file(tmp_path / "c" / "global.safetensors")["p"]
    assert {float(x) for x in saved} == {then for then, _, _, _ in found} and len({end for _, end, _, _ in found}) == 1
    then, end = (float(sum(blocks[k] for blocks in found)) for k in (2, 3))
    want = {"asgd(period=2)": (2 * then, 18.0), "ssp(staleness=3)": (6.0, 6.0)}.get(rule, (then, end))
    assert found[0][:2] == pytest.approx(want)


def test_a_checkpoints_global_model_is_the_center_of_elastic_averaging(tmp_path: Path) -> None:
    def program() -> tuple[float, float]:
        with attached(Numbers(), "easgd(period=2, beta=1.0, overlap=0)", lr=1.0) as (run, model, optimizer):
            for _ in range(2):
                model.p.grad = torch.full((1,), -4.0)
                optimizer.step()
            run.save(tmp_path / "c")
            found = model.value, float(run.global_state()["p"][0])
        return found

    # both at 8: the first pulls the center by 4, to 4; the second by 2, to 6
    assert simulate(program, 2, Clock()) == [(4.0, 6.0), (6.0, 6.0)]
    assert float(load_file(tmp_path / "c" / "global.safetensors")["p"][0]) == 6.0


def test_the_learning_rate_of_a_resumed_schedule_reaches_the_owners(tmp_path: Path) -> None:
    """`load_state_dict` puts new groups into the optimizer; the old ones keep the rate of the beginning."""

    def program(resume: bool) -> float:
        model = Numbers()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with paceline.attach(model, optimizer, "asgd(overlap=0)") as run:
            if resume:
                run.resume(tmp_path / "c", scheduler=scheduler)
            for step in range(run.minibatches, 4):
                model.p.grad = torch.full((1,), -1.0)
                optimizer.step()
                scheduler.step()
                if step == 1 and not resume:
                    run.save(tmp_path / "c", scheduler=scheduler)
        return model.value

    want = 2 * (1.0 + 0.5 + 0.25 + 0.125)
    assert simulate(partial(program, False), 2) == [want] * 2
    assert simulate(partial(program, True), 2) == [want] * 2


def test_an_optimizer_that_has_made_steps_before_it_is_attached_goes_on_at_the_owners() -> None:
    """State that exists at attach goes to the owners, slice by slice, also for parameters without dimensions."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.5))
            self.offset = nn.Parameter(torch.tensor(0.5))
            self.net = make_net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.net(x) * self.scale + self.offset
            return out

    def program(attach: bool, only_scalars: bool) -> Callable[[], Any]:
        def body() -> Any:
            torch.manual_seed(0)
            model = Net()
            own = [model.scale, model.offset] if only_scalars else list(model.parameters())
            for p in model.net.parameters():
                p.requires_grad_(not only_scalars)
            optimizer = torch.optim.Adam(own, lr=0.05)
            x = torch.randn(8, 6)
            run = None
            for step in range(8):
                if step == 4 and attach:
                    run = paceline.attach(model, optimizer, "asgd(overlap=0)")
                optimizer.zero_grad()
                model(x).square().mean().backward()
                if run is None or rank() == 0:
                    optimizer.step()
            if run is not None:
                run.close()
            return {k: v.clone() for k, v in model.state_dict().items()}

        return body

    for only_scalars in (False, True):
        want = program(False, only_scalars)()
        for state in simulate(program(True, only_scalars), 2):
            assert same_bits(state, want)
