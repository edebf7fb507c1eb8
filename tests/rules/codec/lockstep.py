# SPDX-License-Identifier: Apache-2.0
"""N workers in one thread: every generator runs to its next operation, then the bytes of all are moved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.communication.base import Pending
from paceline.rules.codec import Codec, Layout, State, Steps


@dataclass
class Operation:
    """An operation that one worker started; over when the driver has moved its bytes."""

    kind: str
    out: Tensor
    x: Tensor
    out_sizes: list[int] = field(default_factory=list)
    in_sizes: list[int] = field(default_factory=list)
    over: bool = False

    def wait(self) -> None:
        assert self.over


@dataclass
class FakeWire:
    """One worker's end; counts the bytes that leave it. Space is handed out full of rubbish, and full of it again
    when the exchange is over."""

    rank: int
    size: int
    bytes_sent: int = 0
    spaces: list[Tensor] = field(default_factory=list)

    def sum(self, x: Tensor) -> Steps[None]:
        self.bytes_sent += 2 * 4 * x.numel() * (self.size - 1) // self.size
        yield Operation("sum", x, x)

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> Pending:
        assert out.dtype == x.dtype == torch.uint8
        assert len(out_sizes) == len(in_sizes) == self.size
        assert (out.shape, x.shape) == ((sum(out_sizes),), (sum(in_sizes),))
        self.bytes_sent += sum(in_sizes) - in_sizes[self.rank]
        return Operation("all_to_all", out, x, out_sizes, in_sizes)

    def space(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.spaces.append(torch.empty(elements, dtype=dtype, device=device))
        spoil(self.spaces[-1])
        return self.spaces[-1]


def spoil(space: Tensor) -> None:
    """Fill with values that any computation would show."""
    space.fill_(171 if space.dtype == torch.uint8 else float("nan"))


def taken_back(total: Tensor, wire: FakeWire) -> Tensor:
    """The total, after the route has taken all its memory back."""
    own = any(total.data_ptr() == space.data_ptr() for space in wire.spaces)
    kept = total.clone() if own else total
    for space in wire.spaces:
        spoil(space)
    return kept


def move(operations: Sequence[Operation]) -> None:
    """Carry out one operation of all workers."""
    (kind,) = {operation.kind for operation in operations}
    if kind == "sum":
        total = sum(operation.x.clone() for operation in operations)
        for operation in operations:
            operation.out.copy_(total)
    else:
        parts = [operation.x.clone().split(operation.in_sizes) for operation in operations]
        for rank, operation in enumerate(operations):
            for place, sender in zip(operation.out.split(operation.out_sizes), parts, strict=True):
                place.copy_(sender[rank])
    for operation in operations:
        operation.over = True


@dataclass
class Outcome:
    """What the workers of one exchange came out with."""

    totals: list[Tensor]
    states: list[State]
    errors: list[Tensor]
    bytes_sent: list[int]
    operations: int


def exchange(codec: Codec, xs: Sequence[Tensor], layout: Layout, states: Sequence[State] | None = None) -> Outcome:
    """One exchange among `len(xs)` workers; `xs` are copied first."""
    wires = [FakeWire(rank, len(xs)) for rank in range(len(xs))]
    errors = [x.clone() for x in xs]
    states = states or [{} for _ in xs]
    running = [codec.exchange(x, layout, w, s) for x, w, s in zip(errors, wires, states, strict=True)]
    results: list[tuple[Tensor, State]] = []
    steps = 0
    while not results:
        operations = []
        for worker in running:
            try:
                operations.append(next(worker))
            except StopIteration as end:
                results.append(end.value)
        assert not (operations and results), "workers disagree on the number of operations"
        if operations:
            move(operations)  # type: ignore[arg-type]
            steps += 1
    totals, after = zip(*results, strict=True)
    totals = tuple(taken_back(total, wire) for total, wire in zip(totals, wires, strict=True))
    return Outcome(list(totals), list(after), errors, [wire.bytes_sent for wire in wires], steps)
