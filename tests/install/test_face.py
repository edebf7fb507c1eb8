# SPDX-License-Identifier: Apache-2.0
"""The public face: documented, annotated, and typed for those who use it."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import paceline

OBJECTS = {name: getattr(paceline, name) for name in paceline.__all__}
CALLED = {name: thing for name, thing in OBJECTS.items() if callable(thing)}

PROGRAM = '''
"""A program of a user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import assert_type

import paceline
from paceline.rules.codec import Dense
from paceline.data import SharedLoader
from paceline.rules.outer import BlockMomentum
from paceline.rules.payload import Delta
from paceline.rules.recipes import Recipe
from paceline.rules.schedule import EveryBlock
from paceline.forecast.sim import link
from paceline.observe.sinks import Sink
from paceline.rules.topology import Ordered

by_hand = paceline.Rule(EveryBlock(16), Delta("reset"), Dense(), Ordered(), BlockMomentum(momentum=0.75, lr=1.0))
assert_type(by_hand, paceline.Rule)
assert_type(paceline.rule_from_text("bmuf(period=16)"), paceline.Rule)
assert_type(paceline.__version__, str)


class Printed:
    """A sink of the user's own."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Print them."""
        print(step, dict(values))

    def close(self) -> None:
        """Nothing is open."""


sink: Sink = Printed()


def program(batches: list[Tensor]) -> int:
    """Train."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = paceline.attach(model, optimizer, rule=by_hand, log=None, guard=paceline.Guard())
    assert_type(run, paceline.Run)
    run.log_to(sink)
    part = run.share(batches)
    assert_type(part, SharedLoader)
    for batch in part:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()
        run.log(loss=1.0)
    assert_type(run.world, paceline.World)
    assert_type(run.world.rank, int)
    assert_type(run.resume("checkpoint"), bool)
    try:
        run.close()
    except (paceline.PeerLostError, paceline.DesyncError) as error:
        assert isinstance(error, paceline.PacelineError)
    return run.world.size


clock = paceline.Clock(compute=[1.0, 2.0], network=link(latency_s=0.1, bytes_per_s=1e6))
assert_type(paceline.simulate(lambda: program([torch.zeros(4)]), workers=2, clock=clock), list[int | None])
assert_type(clock.now, float)
recipe: Recipe = paceline.RECIPES["bmuf"]
assert_type(paceline.TLS.folder("certificates"), paceline.TLS)
'''
WRONG = {
    "a name that does not exist": ("paceline.atach", "attr-defined"),
    "a number for a rule": ("paceline.rule_from_text(3)", "arg-type"),
    "a program that returns something else": (
        "texts: list[str] = paceline.simulate(lambda: program([]), workers=2)",
        "assignment|arg-type|return-value",
    ),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_every_name_is_documented(name: str) -> None:
    thing = OBJECTS[name]
    if not callable(thing):
        assert name in ("RECIPES", "__version__"), "say what it is in a docstring"
        return
    said = inspect.getdoc(thing)
    assert said and len(said) > 20


def methods(thing: object) -> dict[str, object]:
    """A function, or what a class has of its own that users call."""
    if not inspect.isclass(thing):
        return {"": thing}
    if issubclass(thing, Exception):
        return {}
    return {
        name: getattr(member, "__func__", getattr(member, "fget", member))
        for name, member in vars(thing).items()
        if (name == "__init__" or not name.startswith("_"))
        and isinstance(member, (staticmethod, classmethod, property)) | inspect.isfunction(member)
    }


def test_what_a_part_of_a_run_holds_says_what_it_is() -> None:
    """Their types are those that mypy derives; the program below it asks for some."""
    held = {name: inspect.getdoc(member) for name, member in vars(paceline.Run).items()
            if isinstance(member, property)}  # fmt: skip
    assert "world" in held and all(len(said or "") > 20 for said in held.values()), held


@pytest.mark.parametrize("name", CALLED)
def test_every_argument_and_answer_is_annotated(name: str) -> None:
    for method, function in methods(CALLED[name]).items():
        signature = inspect.signature(function)  # type: ignore[arg-type]
        assert signature.return_annotation is not inspect.Signature.empty, (name, method)
        for argument in signature.parameters.values():
            if argument.name not in ("self", "cls"):
                assert argument.annotation is not inspect.Parameter.empty, (name, method, argument.name)
        if method and method != "__init__":
            assert inspect.getdoc(getattr(CALLED[name], method)), (name, method)


@pytest.mark.processes
@pytest.mark.slow  # mypy reads all of torch
@pytest.mark.timeout(900)
def test_a_program_is_checked_against_the_face(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    (tmp_path / "program.py").write_text(PROGRAM, encoding="utf-8")
    wrong = [PROGRAM, *(f"{line}  # {why}" for why, (line, _) in WRONG.items())]
    (tmp_path / "wrong.py").write_text("\n".join(wrong), encoding="utf-8")
    options = ["--strict", "--follow-imports=silent", "--python-version", "3.10"]
    options += ["--config-file", "", "--cache-dir", str(tmp_path / "cache"), "--no-error-summary"]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "program.py", "wrong.py"],
        cwd=tmp_path, env={"MYPYPATH": str(Path(paceline.__file__).parents[1])}, text=True, capture_output=True,
        timeout=800, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert not done.stderr, done.stderr
    assert not [line for line in lines if line.startswith("program.py")], done.stdout
    first = PROGRAM.count("\n") + 2
    for number, (why, (_, code)) in enumerate(WRONG.items(), first):
        found = [line for line in lines if line.startswith(f"wrong.py:{number}:")]
        assert any(f"[{one}]" in line for line in found for one in code.split("|")), (why, done.stdout)
