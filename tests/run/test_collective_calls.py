# SPDX-License-Identifier: Apache-2.0
"""A call that only some workers make is refused on all of them; `merge` bears a step of difference."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline.communication.base import _ADVICE, AGREEMENT, advice
from paceline.errors import ElsewhereError
from tests.helpers import attached, descend, make_net, same_bits, sgd, simulate, state_of

Call = Callable[[paceline.Run, Path], Any]
CALLS: dict[str, Call] = {
    "run.save(..)": lambda run, path: run.save(path / "saved"),
    "run.resume(..)": lambda run, path: run.resume(path / "none"),
    "run.restore(..)": lambda run, path: run.restore(run.snapshot()),
    "run.merge()": lambda run, path: run.merge(),
    "run.messages.broadcast(..)": lambda run, path: run.messages.broadcast(torch.ones(3)).wait(),
    "run.messages.all_reduce(..)": lambda run, path: run.messages.all_reduce(torch.ones(3)).wait(),
    "run.messages.all_gather(..)": lambda run, path: run.messages.all_gather(torch.ones(2, 3), torch.ones(3)).wait(),
    "run.messages.gather(..)": lambda run, path: run.messages.gather("word"),
    "run.messages.barrier()": lambda run, path: run.messages.barrier(),
}
RULES = ["bmuf(period=2)", "sync", "bmuf(period=2, overlap=2)", "streaming_diloco(period=4, fragments=2)"]


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        descend(model, optimizer, torch.randn(4, 6))


def program_of(rule: str, call: Call, path: Path, said: list[str]) -> None:
    model = make_net()
    optimizer = sgd(model.parameters())
    run = paceline.attach(model, optimizer, rule)
    try:
        steps(model, optimizer, 5)
        if run.world.rank == 0:
            call(run, path)
        steps(model, optimizer, 20)
    except (ElsewhereError, paceline.PeerLostError) as error:
        said.append(str(error))
        raise


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_one_worker_is_named(name: str, rule: str, tmp_path: Path) -> None:
    if name == "run.merge()" and rule == "sync":
        pytest.skip("merges every step, so that nothing is called")
    said: list[str] = []
    under_way = "overlap" in rule or "streaming" in rule  # then virtual workers may meet within an exchange
    with pytest.raises((ElsewhereError, paceline.PeerLostError) if under_way else ElsewhereError):
        simulate(partial(program_of, rule, CALLS[name], tmp_path, said), 2)
    assert not (tmp_path / "saved").exists()
    if under_way and f"for {name}" in said[0]:
        return
    assert f"in {name}, rank 1 on " in said[0] and "optimizer.step()" in said[0], said
    assert f"has to call {name} at the same place" in said[0]


def test_different_calls_and_the_end_are_named(tmp_path: Path) -> None:
    def program(first: Call, other: Call | None) -> None:
        with attached(make_net(), "bmuf") as (run, *_):
            one = first if run.world.rank == 0 else other
            if one is not None:
                one(run, tmp_path)

    with pytest.raises(ElsewhereError, match=r"rank 0 on \S+ in run\.save\(\.\.\), rank 1 on \S+ in run\.messages\.b"):
        simulate(partial(program, CALLS["run.save(..)"], CALLS["run.messages.barrier()"]), 2)
    with pytest.raises(ElsewhereError, match=r"rank 1 on \S+ at its end, in run\.close\(\)"):
        simulate(partial(program, CALLS["run.save(..)"], None), 2)


def test_every_call_has_its_advice() -> None:
    assert set(CALLS) <= set(_ADVICE)
    for call in _ADVICE:
        assert call in advice(call) or call == AGREEMENT


@pytest.mark.parametrize("rule", ["averaging(period=4)", "bmuf(period=4)", "bmuf(period=4, overlap=3)",
                                  "diloco(period=4, fragments=2)", "bmuf(period=1)"])  # fmt: skip
def test_workers_merge_together_though_one_ends_a_block_with_a_step_more(rule: str) -> None:
    """Rank 0 has made 8 steps and its peers 7: it ends its second block while they merge already."""
    merged: list[tuple[int, Any]] = []

    def program() -> tuple[int, Any]:
        with attached(make_net(), rule) as (run, model, optimizer):
            torch.manual_seed(run.world.rank)
            for part in range(3):
                steps(model, optimizer, 7 + (run.world.rank == 0))
                run.merge()
                merged.append((part, run.global_state()))
            blocks = run.blocks
        return blocks, state_of(model)

    ends = simulate(program, 3)
    for part in range(3):
        states = [state for at, state in merged if at == part]
        assert len(states) == 3 and all(same_bits(states[0], state) for state in states[1:])
    assert len({blocks for blocks, _ in ends}) == 1
    assert all(same_bits(ends[0][1], state) for _, state in ends)
