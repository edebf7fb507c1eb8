# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of asynchronous runs that another number of workers goes on from."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import paceline
from paceline.rules.topology.sharded import Sharded
from paceline.update.server import Asynchronous
from tests.checkpoint.test_reshard import SIZES, Make, Quadratic, mean, momentum_sgd, rank, read_back
from tests.helpers import adam, same_bits, sgd, state_of
from tests.tables import dealt
from tests.update.server.programs import RECIPES, simulate

CASES: list[tuple[str, Make]] = [
    *((rule, lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.5)) for rule in RECIPES),
    *((rule, adam) for rule in ("asgd(piece=64)", "asgd(period=4)", "easgd(period=3)", "ssp(staleness=1)")),
]


@pytest.mark.parametrize(("rule", "optimizer", "old", "new"), dealt(CASES, SIZES))
def test_another_number_goes_on(rule: str, optimizer: Make, old: int, new: int, tmp_path: Path) -> None:
    """All begin at the saved global model, bit for bit, and end alike and better."""
    before = simulate(Quadratic(rule, optimizer, save=tmp_path / "c"), old)
    after = simulate(Quadratic(rule, optimizer, 40, resume=tmp_path / "c"), new)
    saved = load_file(tmp_path / "c" / "global.safetensors")
    for one in after:
        assert same_bits(one.start, saved) and same_bits(one.own, saved)
        assert same_bits(one.final, after[0].final)
        assert one.minibatches == 7 and one.blocks == (before[0].blocks_at_the_end if old > 1 < new else 0)
    assert mean([one.losses[-1] for one in after]) < 0.5 * mean([one.losses[0] for one in before])


@pytest.mark.parametrize("rule", ["asgd(overlap=0)", "dc_asgd(kind='adaptive')", "easgd(period=3)", "ssp(staleness=1)"])
def test_who_has_taken_over_can_be_stopped_again(rule: str, tmp_path: Path) -> None:
    """4 saved, 3 went on and saved: who resumes there on 3 has their bits."""
    simulate(Quadratic(rule, adam, save=tmp_path / "four"), 4)
    whole = simulate(Quadratic(rule, adam, 5, resume=tmp_path / "four", save=tmp_path / "three"), 3)
    went_on = simulate(Quadratic(rule, adam, 0, resume=tmp_path / "three"), 3)
    for one, two in zip(went_on, whole, strict=True):
        assert one.minibatches == 12
        assert same_bits(one.final, two.final)


# -- shards ------------------------------------------------------------------------------------------------------------
class Big(nn.Module):
    """Two spans (of two groups) of several shards, one of them with a parameter without dimensions, and buffers
    that are averaged as running statistics are."""

    averages_buffers = True

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(3)
        self.a = nn.Parameter(torch.randn(30, 20, generator=g))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.b = nn.Parameter(torch.randn(451, generator=g))
        self.register_buffer("seen", torch.zeros(150))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def set_gradients(self, worker: int, step: int) -> None:
        """Made up, and different everywhere."""
        g = torch.Generator().manual_seed(100 * worker + step)
        for parameter in self.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=g)
        seen, count = self.get_buffer("seen"), self.get_buffer("count")
        seen.add_(torch.rand(150, generator=g))
        count.add_(1)


def build(optimizer: Make) -> tuple[Big, torch.optim.Optimizer]:
    model = Big()
    return model, optimizer([{"params": [model.a, model.scale]}, {"params": [model.b], "lr": 0.003}])


def train(model: Big, optimizer: torch.optim.Optimizer, worker: int, first: int, steps: int) -> None:
    for step in range(first, first + steps):
        model.set_gradients(worker, step)
        optimizer.step()


def program(
    rule: str, optimizer: Make, steps: Callable[[int], int], save: Path | None = None, resume: Path | None = None
) -> Any:
    """A run; gives back the model's final state and the optimizer's."""
    model, made = build(optimizer)
    with paceline.attach(model, made, rule) as run:
        if resume is not None:
            run.resume(resume)
        train(model, made, rank(), 0, steps(rank()))
        if save is not None:
            run.save(save)
    return state_of(model), made.state_dict()


def whole_spans(path: Path, shard: int) -> dict[str, Tensor]:
    """What a checkpoint holds of the shards, by span: everything end to end."""
    old = read_back(path)
    found: dict[str, Tensor] = {}
    holder = {int(n): r for r in range(old.size) for n in old.keys(r, "exchange", "pieces")}
    number = 0
    for span, numel in enumerate((601, 451, 150, 1)):
        cuts = Sharded(shard).pieces(numel, old.size)
        states = [old.part(holder[number + k], "exchange", "pieces", str(number + k)) for k in range(len(cuts))]
        number += len(cuts)
        found[f"{span} anchor"] = torch.cat([state["anchor"] for state in states])
        for name in states[0]["tensors"]:
            found[f"{span} {name}"] = torch.cat([state["tensors"][name] for state in states])
        for name in states[0]["about"]["numbers"]:
            assert len({state["about"]["numbers"][name] for state in states}) == 1
            found[f"{span} {name}"] = torch.tensor(states[0]["about"]["numbers"][name])
        found[f"{span} version"] = torch.tensor([max(state["about"]["version"] for state in states)])
    assert number == len(holder)
    return found


@pytest.mark.parametrize("new", [2, 3, 7])
@pytest.mark.parametrize(
    ("rule", "shard", "optimizer"),
    [("asgd(piece=64)", 64, adam), ("adadelay()", 262_144, momentum_sgd), ("dc_asgd(kind='adaptive')", 262_144, sgd)],
)
def test_pieces_end_to_end_are_what_was_saved(rule: str, shard: int, optimizer: Make, new: int, tmp_path: Path) -> None:
    """Values, what the optimizer keeps, outer state, counts and versions; nobody has pushed in between."""
    simulate(partial(program, rule, optimizer, lambda r: 5 + r, save=tmp_path / "four"), 4)
    simulate(partial(program, rule, optimizer, lambda r: 0, resume=tmp_path / "four", save=tmp_path / "new"), new)
    want, have = (whole_spans(tmp_path / name, shard) for name in ("four", "new"))
    assert len(want) > 9 - (optimizer is sgd) and same_bits(have, want)


def test_everybody_has_pulled_what_the_owners_have(tmp_path: Path) -> None:
    """The first push has no delay; the values it is computed at are kept for it."""
    simulate(partial(program, "dc_asgd()", momentum_sgd, lambda r: 5 + r, save=tmp_path / "c"), 4)

    def body() -> Any:
        model, optimizer = build(momentum_sgd)
        with paceline.attach(model, optimizer, "dc_asgd()") as run:
            run.resume(tmp_path / "c")
            engine = run._engine
            assert isinstance(engine, Asynchronous)
            shards = {number: (shard.version, shard.anchor) for number, shard in engine._shards.server.shards.items()}
            pulled = {
                one.number: (one.version, span.pulled[one.cut.begin : one.cut.end])
                for span in engine._shards.layout.spans
                for one in span.ranges
            }
            origins = {
                number: {reader: dict(kept) for reader, kept in shard.origins.items()}
                for number, shard in engine._shards.server.shards.items()
                if len(shard.origins)
            }
            run._transport.barrier()
        return shards, pulled, origins

    for shards, pulled, origins in (found := simulate(body, 3)):
        for number, (version, anchor) in shards.items():
            assert version == 26  # 5 + 6 + 7 + 8 pushes
            for _, theirs, _ in found:
                assert theirs[number][0] == version and torch.equal(theirs[number][1], anchor)
        assert pulled
        for number, kept in origins.items():
            assert all(torch.equal(values[26], shards[number][1]) for values in kept.values()) and len(kept) == 3


# -- against the same by hand ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("new", [1, 3, 7])
@pytest.mark.parametrize("optimizer", [momentum_sgd, adam])
def test_one_worker_that_pushes_is_the_plain_optimizer_with_the_saved_state(
    optimizer: Make, new: int, tmp_path: Path
) -> None:
    """From 4 workers, whose owners made the steps; on one, the optimizer gets what the owners had."""
    path = tmp_path / "c"
    simulate(partial(program, "asgd(overlap=0, piece=64)", optimizer, lambda r: 4, save=path), 4)
    resumed = partial(program, "asgd(overlap=0, piece=64)", optimizer, lambda r: 6 if r == 0 else 0, resume=path)

    spans = whole_spans(path, 64)
    model, own = build(optimizer)
    model.load_state_dict(load_file(path / "global.safetensors"))
    state: dict[int, dict[str, Tensor]] = {0: {}, 1: {}, 2: {}}
    for key, value in spans.items():
        span, _, name = key.partition(" optimizer.")
        if not name:
            continue
        if value.dim() == 0:
            parts = {0: value, 1: value} if span == "0" else {2: value}
        elif span == "0":
            parts = {0: value[:600].view(30, 20), 1: value[600]}
        else:
            parts = {2: value}
        for place, part in parts.items():
            state[place][name] = part.clone()
    assert all(len(kept) == (3 if optimizer is adam else 1) for kept in state.values())
    own.load_state_dict({"state": state, "param_groups": own.state_dict()["param_groups"]})
    train(model, own, 0, 0, 6)

    found = [resumed()] if new == 1 else simulate(resumed, new)
    for name, value in model.named_parameters():
        torch.testing.assert_close(found[0][0][name], value.detach())
    if new == 1:
        for place, kept in found[0][1]["state"].items():
            for name, value in kept.items():
                torch.testing.assert_close(value, own.state_dict()["state"][place][name])


@pytest.mark.parametrize("optimizer", [momentum_sgd, adam])
def test_from_one_worker_the_optimizers_state_goes_to_the_owners(optimizer: Make, tmp_path: Path) -> None:
    model, own = build(optimizer)
    with paceline.attach(model, own, "asgd(overlap=0)") as run:
        train(model, own, 0, 0, 4)
        run.save(tmp_path / "c")
        train(model, own, 0, 4, 3)

    def body() -> Any:
        other, made = build(optimizer)
        with paceline.attach(other, made, "asgd(overlap=0)") as again:
            again.resume(tmp_path / "c")
            if rank() == 2:
                train(other, made, 0, 4, 3)
        return state_of(other)

    for state in simulate(body, 4):
        for name, value in model.named_parameters():
            torch.testing.assert_close(state[name], value.detach())
