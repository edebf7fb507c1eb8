# SPDX-License-Identifier: Apache-2.0
"""Where a step is taken: only where a whole iteration of the user's loop is over."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline
from tests.checkpoint.test_exact import kept, steps
from tests.helpers import Program, adam, attached, follow, make_net, same_bits, simulate, train

Body = Callable[[paceline.Run, Callable[[], None], list[Any]], None]


def loader(samples: int) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.ones(samples, 2)), 1)


def taken(body: Body, path: Path, every: int = 1, workers: int = 2, rule: str = "sync") -> list[list[Any]]:
    """What `body(run, step, said)` has said on each worker, and between it the steps that were taken."""

    def program() -> list[Any]:
        with attached(nn.Linear(2, 2), rule, **kept(path, every, keep=99)) as (run, model, optimizer):
            said: list[Any] = []
            checkpointer = run._parts.checkpointer
            assert checkpointer is not None
            take = checkpointer._take

            def taking(*arguments: Any) -> None:
                said.append(f"taken {run.minibatches}")
                take(*arguments)

            checkpointer._take = taking  # type: ignore[method-assign]

            def step() -> None:
                follow(optimizer, model(torch.ones(1, 2)).sum())
                said.append("step")

            body(run, step, said)
        return said

    return simulate(program, workers)


def test_at_the_top_and_over_the_end_of_an_epoch_and_at_the_end(tmp_path: Path) -> None:
    def body(run: paceline.Run, step: Callable[[], None], said: list[Any]) -> None:
        shared = run.share(loader(4))
        for _ in range(2):
            for _batch in shared:
                step()
                said.append("scheduler")
            said.append("validation")

    one = ["step", "scheduler"]
    assert taken(body, tmp_path)[1] == [
        *(*one, "taken 1", *one, "validation"),
        *("taken 2", *one, "taken 3", *one, "validation", "taken 4"),
    ]
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_inner_loops_and_validations_are_no_place(tmp_path: Path) -> None:
    def body(run: paceline.Run, step: Callable[[], None], said: list[Any]) -> None:
        validation, train_ = run.share(loader(4)), run.share(loader(4))
        for _ in range(2):
            for _batch in train_:
                step()
                said.extend("inner" for _ in validation)
            said.extend("outer" for _ in validation)

    said = taken(body, tmp_path)[0]
    inner, outer = ["inner"] * 2, ["outer"] * 2
    assert said == [
        *("step", *inner, "taken 1", "step", *inner, *outer),
        *("taken 2", "step", *inner, "taken 3", "step", *inner, *outer, "taken 4"),
    ]


def test_without_shared_data_the_program_says_where(tmp_path: Path) -> None:
    def body(run: paceline.Run, step: Callable[[], None], said: list[Any]) -> None:
        for _ in range(5):
            said.append(run.checkpoint())
            step()

    assert taken(body, tmp_path, every=2)[0] == [
        *(False, "step", False, "step", "taken 2", True, "step", False, "step", "taken 4", True, "step")
    ]
    assert steps(tmp_path) == [2, 4]


def test_where_no_place_comes_it_is_said_once_with_the_cure(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def body(run: paceline.Run, step: Callable[[], None], said: list[Any]) -> None:
        for _ in range(5):
            step()

    assert taken(body, tmp_path)[0] == ["step"] * 5
    assert steps(tmp_path) == []
    said = [one.getMessage() for one in caplog.records]
    assert len(said) == 2 and all("call run.checkpoint() at the top of your loop" in text for text in said)


@pytest.mark.parametrize("rule", ["sync", "averaging(period=2)", "averaging(period=4, overlap=2)"])
@pytest.mark.parametrize("samples", [7, 9, 11])
def test_workers_that_end_at_different_times(rule: str, samples: int, tmp_path: Path) -> None:
    """Nobody waits for one that has come to its end; what was taken is whole and goes on to the same bits."""
    choices: dict[str, Any] = {"samples": samples, "batch": 1, "epochs": 1, "optimizer": adam}
    whole = train(rule, 3, **choices)
    outs = train(rule, 3, **choices, settings=kept(tmp_path, keep=9))
    assert all(same_bits(one.model, other.model) for one, other in zip(outs, whole, strict=True))
    for number in steps(tmp_path):
        again = simulate(Program(rule, resume=tmp_path / f"step-{number:09d}", **choices), 3)
        assert all(same_bits(one.model, other.model) for one, other in zip(again, whole, strict=True))


@pytest.mark.processes
def test_the_global_model_needs_two_lines_of_plain_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    outs = train("bmuf(period=3)", 2, epochs=1, settings=kept(tmp_path))
    torch.save(outs[0].exported, tmp_path / "exported.pt")
    program = f"""
import sys
sys.modules["paceline"] = None
import torch
from torch import nn
from safetensors.torch import load_file
model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
model.load_state_dict(load_file("{tmp_path}/step-000000006/global.safetensors"))
wanted = torch.load("{tmp_path}/exported.pt", weights_only=True)
assert all(torch.equal(wanted[name], value) for name, value in model.state_dict().items())
"""
    assert [name for name in make_net().state_dict()] == list(outs[0].exported)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
