# SPDX-License-Identifier: Apache-2.0
"""Exchanges behind a block without threads, as over NCCL: a fake communicator's operations complete when the test says.

`wait` of a device's operation lets a stream wait, and never the host; that of a header lets the host wait, which no
test here allows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline
from paceline.communication.base import BLOCK, CompletedOperation, Pending, SoloTransport
from paceline.core.optimizer_state import Owned
from paceline.core.world import World
from paceline.rules.recipes import rule_from_text
from paceline.rules.topology.flat import Flat
from paceline.update.engine.blocks.fragment import FragmentState, LocalOptimizers
from paceline.update.engine.blocks.outer_state import BlockNumbers, OuterStateChunk, cut_states
from paceline.update.exchange.exchanger import ExchangeHeader, Exchanger
from paceline.update.exchange.pipeline import LastWait, Pipeline, SideStream
from tests.helpers import attached, follow


class Stream(SideStream):
    """Writes down what is asked of it."""

    def __init__(self, said: list[str]) -> None:
        self._said, self._inside = said, 0

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:  # type: ignore[override]
        self._inside += 1
        yield
        self._inside -= 1

    def fork(self) -> None:
        self._said.append("fork")

    def join(self) -> None:
        self._said.append("join")

    @property
    def inside(self) -> bool:
        return self._inside > 0


class Operation:
    """An operation of the device."""

    def __init__(self, name: str, said: list[str], side: Stream) -> None:
        self.name, self._said, self._side, self.over = name, said, side, False
        assert side.inside, "started on the stream of training"
        said.append(f"start {name}")

    def wait(self) -> None:
        assert self._side.inside, "the stream of training waits"
        self._said.append(f"wait {self.name}")

    def completed(self) -> bool:
        return self.over


class Told:
    """Something that the host waits for."""

    def __init__(self) -> None:
        self.over = False

    def wait(self) -> None:
        assert self.over, "the host waits"

    def completed(self) -> bool:
        return self.over


def exchange(name: str, operations: int, header: Told, said: list[str], side: Stream, found: list[Any]) -> Any:
    for number in range(operations):
        operation = Operation(f"{name}{number}", said, side)
        found.append(operation)
        yield operation
    yield LastWait(header.wait, header.completed)
    said.append(f"apply {name}")
    return name


def test_all_operations_are_queued_on_the_side_stream_when_the_exchange_starts() -> None:
    said: list[str] = []
    side, header, found = Stream(said), Told(), list[Any]()
    running = Pipeline(False, 3, [side]).start(exchange("a", 3, header, said, side, found))
    assert said == ["fork", "start a0", "wait a0", "start a1", "wait a1", "start a2"]
    header.over = True
    assert running.finish() == "a"
    assert said[6:] == ["wait a2", "apply a", "join"]


def test_the_result_is_applied_between_two_steps_once_device_and_headers_are_there() -> None:
    said: list[str] = []
    side, header, found = Stream(said), Told(), list[Any]()
    pipeline = Pipeline(False, 2, [side])
    running = pipeline.start(exchange("a", 2, header, said, side, found))
    began = len(said)
    pipeline.progress()
    assert said[began:] == []
    found[-1].over = True
    pipeline.progress()
    assert said[began:] == ["fork", "wait a1"]  # the header is missing
    pipeline.progress()
    assert said[began:] == ["fork", "wait a1"]
    header.over = True
    pipeline.progress()
    assert said[began:] == ["fork", "wait a1", "fork", "apply a"] and running.over
    pipeline.progress()
    assert running.finish() == "a" and said[-2:] == ["apply a", "join"]


def test_the_order_of_operations_does_not_depend_on_when_they_complete() -> None:
    starts = []
    for quick in (0, 1):
        said: list[str] = []
        side, headers, found = Stream(said), [Told(), Told()], list[Any]()
        pipeline = Pipeline(False, 2, [side])
        running = [pipeline.start(exchange("ab"[k], 2, headers[k], said, side, found)) for k in (0, 1)]
        for operation in found:
            operation.over = True
        headers[quick].over = True
        pipeline.progress()
        assert running[quick].over and not running[1 - quick].over
        headers[1 - quick].over = True
        assert [one.finish() for one in running] == ["a", "b"]
        starts.append([what for what in said if what.startswith("start")])
    assert starts[0] == starts[1] == ["start a0", "start a1", "start b0", "start b1"]


def test_what_fails_between_two_steps_is_raised_when_the_exchange_is_finished() -> None:
    said: list[str] = []
    side, header = Stream(said), Told()

    def failing() -> Any:
        yield LastWait(header.wait, header.completed)
        raise ValueError("the mean is bad")

    pipeline = Pipeline(False, 1, [side])
    running = pipeline.start(failing())
    header.over = True
    pipeline.progress()
    with pytest.raises(ValueError, match="the mean is bad"):
        running.finish()


# -- a whole exchange -------------------------------------------------------------------------------------------------
class Communicator(SoloTransport):
    """Sums over itself; tells when an operation has completed."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[Told] = []
        self.sums: list[Told] = []

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        super().all_gather(out, x)
        self.headers.append(Told())
        return self.headers[-1]

    def _device(self) -> Pending:
        self.sums.append(Told())
        self.sums[-1].wait = lambda: None  # type: ignore[method-assign]  # its stream waits
        return self.sums[-1]

    def all_reduce(self, x: Tensor) -> Pending:
        return self._device()

    def all_to_all(self, out: Tensor, x: Tensor, *sizes: Any) -> Pending:
        super().all_to_all(out, x, *sizes)
        return self._device()


def moved(rule: str) -> tuple[FragmentState, list[OuterStateChunk], Exchanger, Communicator]:
    """A model that has left its block's start, and an exchange of it over the communicator."""
    torch.manual_seed(1)
    model = nn.Linear(20, 30)
    made = rule_from_text(rule)
    owned: Owned = [(torch.optim.SGD(model.parameters(), lr=0.1), list(model.named_parameters()))]
    numbers, communicator = BlockNumbers(made, 2), Communicator()
    numbers.minibatches = 2
    state = FragmentState(model, LocalOptimizers(made.delta, owned), numbers, None, World)
    exchanger = Exchanger(communicator, made.codec, Flat(), overlapped=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    return state, cut_states(state.all, exchanger, numbers, measured=False), exchanger, communicator


HEADER = ExchangeHeader(0, BLOCK, True, False, True, 2, 0.0, 1.0, 2, 0)


@pytest.mark.parametrize("codec", ["dense", "int8", "one_bit", "low_rank", "top_k"])
def test_the_outer_step_is_made_behind_the_block(codec: str) -> None:
    state, chunks, exchanger, communicator = moved(f"diloco(period=2, overlap=1, codec='{codec}')")
    state.take_snapshot()
    before = [one.anchor.clone() for one in state.parameters]
    under_way = exchanger.start(HEADER, chunks, 0, state.checksum, overlapped=True)
    exchanger.progress()
    for operation in communicator.sums:
        operation.over = True
    exchanger.progress()
    assert all(torch.equal(one.anchor, was) for one, was in zip(state.parameters, before, strict=True))
    for header in communicator.headers:
        header.over = True
    started = len(communicator.sums)
    exchanger.progress()
    after = [one.anchor.clone() for one in state.parameters]
    assert not any(torch.equal(one, was) for one, was in zip(after, before, strict=True))
    under_way.finish(1)
    assert all(torch.equal(one.anchor, was) for one, was in zip(state.parameters, after, strict=True))
    assert len(communicator.sums) == started, "no operation starts after the exchange has begun"


OVERLAPPED = [
    "diloco(period=4, overlap=2)",
    "bmuf_adam(period=4, overlap=2, codec='int8')",
    "streaming_diloco(period=4, fragments=2, overlap=3)",
]


@pytest.mark.parametrize("rule", OVERLAPPED)
def test_training_does_not_depend_on_when_the_outer_step_is_made(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = OuterStateChunk.prepare

    def program() -> tuple[list[Tensor], list[int]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Linear(10, 3))
        kind: Any = torch.optim.Adam if "adam" in rule else torch.optim.SGD
        optimizer, steps = kind(model.parameters(), lr=0.05), []
        with paceline.attach(model, optimizer, rule) as run:
            generator = torch.Generator().manual_seed(run.world.rank)
            for _ in range(13):
                optimizer.zero_grad()
                model(torch.randn(8, 6, generator=generator)).square().mean().backward()
                made.clear()
                optimizer.step()
                steps.append(len(made))
        return [tensor.clone() for tensor in model.state_dict().values()], steps

    def prepare(self: OuterStateChunk, *given: Any) -> None:
        made.append(1)
        plain(self, *given)

    monkeypatch.setattr(OuterStateChunk, "prepare", prepare)
    (at_landing, landings), _ = paceline.simulate(program, 2)
    monkeypatch.setattr(CompletedOperation, "completed", lambda self: True, raising=False)
    (between_steps, steps), _ = paceline.simulate(program, 2)
    assert landings != steps, "the outer step is made earlier"
    assert all(torch.equal(one, other) for one, other in zip(at_landing, between_steps, strict=True))


def test_exchanges_in_flight_progress_at_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    monkeypatch.setattr(Exchanger, "progress", lambda self: called.append(1))

    def program() -> None:
        with attached(nn.Linear(2, 2), "diloco(period=3, overlap=1)", lr=0.1) as (_, model, optimizer):
            for _ in range(7):
                follow(optimizer, model(torch.randn(3, 2)).sum())

    paceline.simulate(program, 2)
    assert len(called) == 4, "at steps 4 and 7 of each worker"
