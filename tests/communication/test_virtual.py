# SPDX-License-Identifier: Apache-2.0
"""Virtual workers: one at a time, each with its own globals, the same every time."""

from __future__ import annotations

import random
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.communication import virtual
from paceline.errors import PeerLostError
from tests.helpers import here


def test_operations() -> None:
    def body() -> list[Any]:
        t = here()
        rank = t.world.rank
        x = torch.full((2,), float(rank + 1))
        t.all_reduce(x).wait()
        rows = torch.arange(3.0) + 10 * rank
        out = torch.empty(3, 1)
        t.all_to_all(out, rows.view(3, 1)).wait()
        everybody = torch.empty(3, 2)
        t.all_gather(everybody, torch.tensor([rank, rank * 2.0])).wait()
        b = torch.tensor([float(rank)])
        t.broadcast(b, 2).wait()
        t.barrier()
        return [x.tolist(), out.flatten().tolist(), everybody.tolist(), b.item(), t.gather_json({"r": rank, "é": None})]

    for rank, (x, out, everybody, b, said) in enumerate(virtual.run(3, body)):
        assert x == [6.0, 6.0]
        assert out == [rank, 10.0 + rank, 20.0 + rank]
        assert everybody == [[0, 0], [1, 2], [2, 4]]
        assert b == 2.0
        assert said == [{"r": r, "é": None} for r in range(3)]


def test_sums_are_in_rank_order() -> None:
    parts = [torch.tensor([1e8]), torch.tensor([1.0]), torch.tensor([-1e8]), torch.tensor([1.0])]

    def body() -> float:
        x = parts[here().world.rank].clone()
        here().all_reduce(x).wait()
        return float(x)

    want = float(((parts[0] + parts[1]) + parts[2]) + parts[3])
    assert virtual.run(4, body) == [want] * 4


def draw() -> list[float]:
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


def test_every_worker_has_generators_of_its_own() -> None:
    def body() -> list[list[float]]:
        torch.manual_seed(here().world.rank)
        np.random.seed(here().world.rank)
        random.seed(here().world.rank)
        found = []
        for _ in range(3):
            found.append(draw())
            here().barrier()
        return found

    def alone(rank: int) -> list[list[float]]:
        torch.manual_seed(rank)
        np.random.seed(rank)
        random.seed(rank)
        return [draw() for _ in range(3)]

    want = [alone(rank) for rank in range(3)]
    torch.manual_seed(77)
    before = torch.get_rng_state()
    assert virtual.run(3, body) == want
    assert torch.equal(torch.get_rng_state(), before)  # the caller's own are untouched


def test_workers_start_from_the_callers_generators() -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    want = draw()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    assert virtual.run(3, draw) == [want] * 3


def test_argv_stdout_and_main_move_with_the_baton() -> None:
    def body() -> tuple[str, str]:
        sys.argv = [f"worker{here().world.rank}"]
        here().barrier()
        return sys.argv[0], type(sys.stdout).__name__

    before = sys.argv
    assert [name for name, _ in virtual.run(3, body)] == ["worker0", "worker1", "worker2"]
    assert sys.argv is before


def test_a_workers_clock_stops_during_other_workers_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: wall[0])

    def program() -> list[float]:
        transport = virtual.current()
        assert transport is not None
        seen = [transport.now()]
        for _ in range(2):
            wall[0] += 10.0**transport.world.rank  # a turn of 1, 10 or 100 seconds
            transport.barrier()
            seen.append(transport.now())
        return [later - sooner for sooner, later in pairwise(seen)]

    assert virtual.run(3, program) == [[1.0, 1.0], [10.0, 10.0], [100.0, 100.0]]


def test_different_exchanges_are_an_error_that_names_them() -> None:
    def body() -> None:
        if here().world.rank == 1:
            here().all_reduce(torch.zeros(3)).wait()
        else:
            here().all_reduce(torch.zeros(4)).wait()

    with pytest.raises(PeerLostError, match=r"worker 0 waits at all_reduce of 4; worker 1 waits at all_reduce of 3"):
        virtual.run(2, body)


def test_a_worker_that_has_ended_is_named() -> None:
    def body() -> None:
        if here().world.rank != 2:
            here().barrier()

    with pytest.raises(PeerLostError, match=r"worker 0 waits at .*; worker 2 has ended"):
        virtual.run(3, body)


def test_exit_codes() -> None:
    def leave(code: object) -> None:
        raise SystemExit(code)

    assert virtual.run(2, lambda: leave(0)) == [None, None]
    with pytest.raises(SystemExit):
        virtual.run(2, lambda: leave(3))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="at least 1, got 0"):
        virtual.run(0, lambda: None)
    with pytest.raises(ValueError, match="cannot start virtual workers"):
        virtual.run(2, lambda: virtual.run(2, lambda: None))
    assert virtual.current() is None


def test_workers_must_not_share_a_model() -> None:
    model = torch.nn.Linear(2, 2)

    def body() -> None:
        paceline.attach(model, torch.optim.SGD(model.parameters(), 0.1), "sync")

    with pytest.raises(paceline.UnsupportedError, match="virtual workers 0 and 1 attached the same parameter"):
        virtual.run(2, body)


SCRIPT = """
import sys
import torch
import paceline
from torch import nn

if __name__ == "__main__":
    torch.manual_seed(0)
    steps = int(sys.argv[1])
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = paceline.attach(model, optimizer, "bmuf(period=2)")
    data = torch.arange(72.0).view(24, 3) / 72
    done = 0
    for x in run.share(torch.utils.data.DataLoader(data, 2)):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        done += 1
    print("worker", run.world.rank)
    print("did", done, "of", steps)
    final = [p.detach().clone() for p in model.parameters()]
"""


def test_a_script_runs_unchanged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    names = paceline.simulate(str(script), 4, ["3"])
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == sorted(f"[{r}] {text}" for r in range(4) for text in (f"worker {r}", "did 3 of 3"))
    models = [list(n["model"].parameters()) for n in names if n is not None]
    assert len(models) == 4
    for model in models[1:]:  # the runs were closed at the end of the script
        assert all(torch.equal(a, b) for a, b in zip(model, models[0], strict=True))
    assert sys.modules["__main__"] is not None and "train" not in str(sys.modules["__main__"])


def test_simulate_refuses(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no script"):
        paceline.simulate(tmp_path / "none.py", 2)
    with pytest.raises(ValueError, match="bind a function"):
        paceline.simulate(lambda: 0, 2, ["x"])
