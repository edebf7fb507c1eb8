# SPDX-License-Identifier: Apache-2.0
"""The example of a Caffe-like trainer: what its cluster changes, and that four workers end as one does."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from tests.helpers import simulate

pytest.importorskip("sklearn")
EXAMPLE = Path(__file__).parents[2] / "examples" / "array_tools"
if not EXAMPLE.is_dir():
    pytest.skip("the examples are not beside the package", allow_module_level=True)


@pytest.fixture(autouse=True)
def _beside_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))


def after(name: str) -> dict[str, Any]:
    """The names of the program when it is over."""
    found: dict[str, Any] = {}
    exec(compile((EXAMPLE / name).read_text(encoding="utf-8"), name, "exec"), found)
    return found


def bits(program: dict[str, Any]) -> list[bytes]:
    return [blob.data.tobytes() for blob in program["solver"].params]


def test_few_lines_change() -> None:
    texts = [(EXAMPLE / name).read_text(encoding="utf-8").splitlines() for name in ("train.py", "train_paceline.py")]
    code = [[line for line in text if line and not line.startswith('"""')] for text in texts]
    changed = [line for line in difflib.ndiff(*code) if line[:2] in ("+ ", "- ")]
    assert 0 < len(changed) <= 10, "\n".join(changed)


def test_the_gradient_is_that_of_the_loss() -> None:
    from solver import Net

    net = Net(3, [("ip1", "InnerProduct", {"num_output": 4}), ("relu", "ReLU", {})], seed=0)
    blob, draw = net.params["ip1"][0], np.random.default_rng(1)
    net.set_input_arrays(draw.normal(size=(5, 3)), np.array([0, 3, 1, 1, 2]))
    losses = []
    for change in (0.001, -0.002):
        blob.data[1, 2] += change
        net.forward_backward()
        losses.append(net.blobs["loss"])
    blob.data[1, 2] += 0.001
    net.forward_backward()
    assert (losses[0] - losses[1]) / 0.002 == pytest.approx(float(blob.diff[1, 2]), rel=1e-3)


def test_one_worker_is_the_plain_program_and_four_end_close_to_it() -> None:
    plain, alone = after("train.py"), after("train_paceline.py")
    assert bits(alone) == bits(plain)
    four = simulate(lambda: after("train_paceline.py"), 4)
    assert all(bits(one) == bits(four[0]) for one in four)
    assert sum(one["run"].samples for one in four) == alone["run"].samples == 20 * 1400
    assert plain["right"] > 0.85 and four[0]["right"] > plain["right"] - 0.02


def test_the_rate_is_tuned_on_all_workers_at_the_same_block() -> None:
    from solver import Net, SGDSolver

    def program() -> list[float]:
        solver = SGDSolver(Net(2, [("ip", "InnerProduct", {"num_output": 2})], seed=0), base_lr=0.5)
        solver.net.set_input_arrays(np.eye(2), np.array([0, 1]))
        rates = []
        with paceline.attach_arrays([blob.data for blob in solver.params], "averaging(period=4)") as run:
            for step in range(12):
                if (run.world.rank, step) == (1, 2):
                    run.tune(lr=0.25)
                solver.base_lr = run.tuned("lr", 0.5)
                rates.append(solver.rate)
                solver.step(1)
                run.step()
        return rates

    assert simulate(program, 2) == [[0.5] * 4 + [0.25] * 8] * 2
