# SPDX-License-Identifier: Apache-2.0
"""The seam between paceline and whatever carries its bytes.

A transport has four operations, started in the same order on every worker, each answered by a :class:`Pending`. Sums
are sums, never means. `bytes_sent` counts what this worker sends, by the formulas below, which hold for the ring and
pairwise algorithms of the common back ends (S = bytes of the tensor, N = workers):

==============  =======================
all_reduce      2 (N-1)/N S
all_to_all      (N-1)/N S
all_gather      (N-1) S      (S of one worker's part)
broadcast       S            (counted at the source, for each of the N-1 others)
==============  =======================
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.world import World


class Pending(Protocol):
    """An operation under way."""

    def wait(self) -> None:
        """Return when the result is there; raise `PeerLostError` when the deadline passes first."""


class Done:
    """An operation that was over when it began."""

    def wait(self) -> None:
        """Nothing to wait for."""


class Transport(ABC):
    """One worker's connection to the others."""

    name: str
    world: World
    bytes_sent: int = 0

    background = False

    def open_channels(self, number):
        pass

    def channel(self, number):
        return self

    def wire_device(self, device: torch.device) -> torch.device:
        """Where a tensor of `device` has to lie for an exchange: the same device unless the carrier cannot."""
        return device

    @abstractmethod
    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` over the workers, in place, in an order that the carrier chooses."""

    @abstractmethod
    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        """`x`, shape (N, k): row j goes to worker j; `out`, shape (N, k): row i came from worker i."""

    @abstractmethod
    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (N, k): row i is `x`, shape (k,), of worker i."""

    @abstractmethod
    def broadcast(self, x: Tensor, source: int) -> Pending:
        """Make `x` what it is on worker `source`, in place."""

    @abstractmethod
    def close(self) -> None:
        """Let the connection go; nothing may be started after it."""

    def gather_json(self, value: Any) -> list[Any]:
        """Every worker's `value`, in rank order. JSON, so that nothing that arrives is ever executed."""
        text = json.dumps(value).encode()
        own = torch.tensor([len(text)], dtype=torch.int64)
        sizes = torch.empty(self.world.size, 1, dtype=torch.int64)
        self._on_wire(sizes, own)
        longest = int(sizes.max())
        row = torch.zeros(longest, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = torch.empty(self.world.size, longest, dtype=torch.uint8)
        self._on_wire(rows, row)
        return [json.loads(bytes(line[: int(size)].tolist())) for line, size in zip(rows, sizes.flatten(), strict=True)]

    def _on_wire(self, out: Tensor, x: Tensor) -> None:
        """all_gather of small host tensors over whatever device the carrier wants."""
        device = self.wire_device(out.device)
        if device == out.device:
            self.all_gather(out, x).wait()
            return
        result = out.to(device)
        self.all_gather(result, x.to(device)).wait()
        out.copy_(result)

    def barrier(self) -> None:
        """Return when every worker has come here."""
        self._on_wire(torch.empty(self.world.size, 1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8))

    def count(self, operation: str, x: Tensor) -> None:
        """Add what this operation makes this worker send to `bytes_sent`."""
        size, others = self.world.size, self.world.size - 1
        nbytes = x.numel() * x.element_size()
        if operation == "all_reduce":
            self.bytes_sent += 2 * nbytes * others // size
        elif operation == "all_to_all":
            self.bytes_sent += nbytes * others // size
        else:  # all_gather, and a broadcast at its source
            self.bytes_sent += nbytes * others


class Alone(Transport):
    """A cluster of one: every exchange is over at once and sends nothing."""

    name = "none"

    def __init__(self, world: World | None = None) -> None:
        self.world = world or World()

    def all_reduce(self, x: Tensor) -> Pending:
        return Done()

    def all_to_all(self, out: Tensor, x: Tensor) -> Pending:
        out.copy_(x)
        return Done()

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        out[0].copy_(x)
        return Done()

    def broadcast(self, x: Tensor, source: int) -> Pending:
        return Done()

    def close(self) -> None:
        """Nothing was opened."""
