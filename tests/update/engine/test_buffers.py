# SPDX-License-Identifier: Apache-2.0
"""Buffers: the running statistics of normalisation layers are the workers' mean, everything else is one worker's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline
from paceline.core import flat as paceline_flat
from tests.helpers import CLASSES, FEATURES, State, attached, learn, make_data, same_bits, simulate, state_of

WORKERS, BATCH, ROWS = 3, 4, 8
COLLECTIVE = [
    "sync",
    "sync(reproducible=True)",
    "sync(dimensions='hosts')",
    "one_bit(warmup=2)",
    "averaging(period=3)",
    "averaging(period=3, warmup=2)",
    "bmuf(period=3)",
    "bmuf(period=3, overlap=2)",
    "bmuf(period=3, codec='int8')",
    "bmuf(period=3, ema=0.5)",
    "bmuf(period=3, within='host')",
    "diloco(period=3)",
    "streaming_diloco(period=4, fragments=2)",
    "auto(first=3)",
]
ALONE = ["asgd", "asgd(period=3)", "ssp(staleness=2)", "dc_asgd", "easgd(period=3)"]
FAST = ("sync", "bmuf(period=3)", "bmuf(period=3, overlap=2)", "streaming_diloco(period=4, fragments=2)", "asgd")
AVERAGED = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
TABLE = [rule if rule in FAST else pytest.param(rule, marks=pytest.mark.full) for rule in (*COLLECTIVE, *ALONE)]


class Kinds(nn.Module):
    """A model with one buffer of each kind, all of which the workers write differently.

    Attributes:
        queue, place: a ring of unit vectors and where the next ones go, as of MoCo; a place that is no multiple of the
            batch would not fit.
        pruned, kept: masks of 0 and 1, and of booleans.
        lowest: a minimum, infinite at first.
        tally: an integer counter of its own.
        scratch: not persistent.
        wave: complex.
        centre: the program's own average, written after the step.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lin, self.norm, self.out = nn.Linear(FEATURES, 5), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(ROWS, 5), dim=1))
        self.register_buffer("place", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("pruned", torch.ones(5))
        self.register_buffer("kept", torch.ones(5, dtype=torch.bool))
        self.register_buffer("lowest", torch.full((3,), float("inf")))
        self.register_buffer("tally", torch.zeros((), dtype=torch.int32))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("wave", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("centre", torch.zeros(CLASSES, dtype=torch.float64))
        self.rank = 0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.lin(x)) * self.pruned.clone() * self.kept.clone()
        if self.training:
            with torch.no_grad():
                begin = int(self.place)
                self.queue[begin : begin + BATCH] = nn.functional.normalize(self.norm(self.lin(x)), dim=1)
                self.place[0] = (begin + BATCH) % ROWS
                self.pruned[self.rank], self.kept[self.rank + 1] = 0, False
                self.lowest[1:] = torch.minimum(self.lowest[1:], x.min())
                self.tally += 1 + self.rank
                self.scratch.data[0] += x.sum()
                self.wave = self.wave * complex(0, 1 + self.rank)
        return self.out(hidden)


def buffers_of(model: nn.Module) -> State:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def program(rule: str, place: Path | None = None, bad: int | None = None) -> dict[str, Any]:
    """A worker's training: its buffers in each of the last steps, before and after the step; and at the end."""
    with attached(Kinds(), rule, lr=0.05) as (run, model, optimizer):
        model.rank = run.world.rank
        seen: list[State] = []
        for _ in range(2):
            for x, y in run.share(DataLoader(make_data(48), BATCH)):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                (loss * float("nan") if bad == run.minibatches and run.world.rank == 0 else loss).backward()
                seen.append(buffers_of(model))
                optimizer.step()
                with torch.no_grad():
                    model.centre.mul_(0.9).add_(0.1 * model.out.bias * (1 + run.world.rank))
                seen.append(buffers_of(model))
        if place is not None:
            run.save(place)
        found = {"saved": run.global_state()}
    return {**found, "seen": seen, "end": buffers_of(model), "exported": buffers_of(run.model_for_export())}


def simulated(rule: str, *args: Any) -> list[dict[str, Any]]:
    hosts = ("a", "a", "b") if "host" in rule else None
    torch.manual_seed(5)
    return [one or {} for one in paceline.simulate(lambda: program(rule, *args), WORKERS, hosts=hosts)]


def check(now: State, name: str) -> None:
    """What a buffer means."""
    value = now[name]
    if name == "queue":
        assert torch.allclose(value.norm(dim=1), torch.ones(ROWS)), value
    elif name == "place":
        assert int(value) % BATCH == 0
    elif name == "pruned":
        assert set(value.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("rule", TABLE)
def test_each_kind_of_buffer_ends_as_one_workers_own(rule: str) -> None:
    """Rank 0's; where each worker exchanges by itself, those of the last worker that still pushed."""
    outs = simulated(rule)
    end = outs[0]["end"]
    for out in outs:
        assert same_bits(out["end"], end) and same_bits(out["exported"], end)
    own = [name for name in end if name not in AVERAGED]
    assert len(own) == 9 and len(end) == 12
    ends = [outs[0]["seen"][-1]] if rule in COLLECTIVE else [seen for out in outs for seen in out["seen"][-4:]]
    assert any(all(torch.equal(end[name], last[name]) for name in own) for last in ends)
    for name in own:
        check(end, name)
    last = [{name: out["seen"][-1][name] for name in AVERAGED} for out in outs]
    if not all(same_bits(one, last[0]) for one in last):  # else all have had the mean since the last backward pass
        assert not same_bits({name: end[name] for name in AVERAGED}, {name: ends[0][name] for name in AVERAGED})


@pytest.mark.parametrize("rule", TABLE)
def test_what_is_saved_has_one_workers_buffers(rule: str, tmp_path: Path) -> None:
    outs = simulated(rule, tmp_path / "saved")
    for out in outs:
        for name in ("queue", "place", "pruned", "kept", "tally"):
            check(out["saved"], name)
            assert any(same_bits({name: out["saved"][name]}, {name: seen[name]}) for seen in outs[0]["seen"]), name


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=3)", "bmuf(period=3, overlap=2)"])
def test_a_rejected_contribution_leaves_the_buffers_of_one_worker(rule: str) -> None:
    """Rank 0 is left out of an exchange: its parameters are, and its buffers are still those that all take."""
    outs = simulated(rule, None, 4)
    for out in outs:
        assert same_bits(out["end"], outs[0]["end"])
    for name in ("queue", "place", "pruned"):
        check(outs[0]["end"], name)
    assert all(bool(value.isfinite().all()) for name, value in outs[0]["end"].items() if name != "lowest")


def resumed(rule: str, place: Path) -> dict[str, Any]:
    with attached(Kinds(), rule, lr=0.05) as (run, model, _):
        run.resume(place)
        found = {"begin": buffers_of(model), "saved": run.global_state()}
    return found


@pytest.mark.parametrize("workers", [2, 1])
@pytest.mark.parametrize("rule", ["sync", "bmuf(period=3)", "diloco(period=3, overlap=2)", "asgd"])
def test_another_number_of_workers_begins_with_one_workers_buffers(rule: str, workers: int, tmp_path: Path) -> None:
    saved = simulated(rule, tmp_path / "saved")[0]["saved"]
    for out in simulate(lambda: resumed(rule, tmp_path / "saved"), workers):
        kept = {name: value for name, value in out["begin"].items() if name != "scratch"}
        assert same_bits(kept, {name: saved[name] for name in kept})


class Norms(nn.Module):
    """Layers with running statistics, of torch and of the user's own."""

    def __init__(self) -> None:
        super().__init__()

        class Own(nn.BatchNorm1d):
            """A subclass with a buffer of its own."""

            def __init__(self) -> None:
                super().__init__(FEATURES)
                self.register_buffer("seen", torch.zeros(FEATURES))

        self.batch, self.own = nn.BatchNorm1d(FEATURES), Own()
        self.instance = nn.InstanceNorm1d(FEATURES, track_running_stats=True)
        self.sync, self.lazy = nn.SyncBatchNorm(FEATURES), nn.LazyBatchNorm1d()
        self.plain = nn.InstanceNorm1d(FEATURES)
        self.lazy(torch.ones(2, FEATURES))


def test_running_statistics_are_known_by_the_type_of_their_module() -> None:
    model = Norms()
    names = ("running_mean", "running_var", "num_batches_tracked")
    layers = ("batch", "own", "instance", "sync", "lazy")
    assert {name for name, _ in paceline_flat.averaged_buffers(model)} == {f"{a}.{b}" for a in layers for b in names}
    assert [name for name, _ in paceline_flat.other_buffers(model)] == ["own.seen"]


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=3)", "bmuf(period=3, overlap=2)", "asgd"])
def test_buffers_that_workers_write_apart_are_named_once(rule: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "paceline"):
        simulated(rule)
    said = [text for text in caplog.messages if "rank 0's" in text]
    for name in ("queue", "pruned", "centre"):
        assert sum(name in text for text in said) == 1, said
    assert not any(name in text for text in said for name in ("norm.", "place", "kept"))


def test_buffers_that_are_constant_are_not_named(caplog: pytest.LogCaptureFixture) -> None:
    def constant() -> State:
        model = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))
        model.register_buffer("table", torch.linspace(0, 1, 9))
        with attached(model, "bmuf(period=3)", lr=0.05) as (run, _, optimizer):
            for x, y in run.share(DataLoader(make_data(48), BATCH)):
                learn(model, optimizer, x, y)
        return state_of(model)

    with caplog.at_level(logging.WARNING, "paceline"):
        simulate(constant, WORKERS)
    assert not caplog.messages
