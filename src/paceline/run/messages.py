# SPDX-License-Identifier: Apache-2.0
"""`run.messages`: messages of the user's program between workers.

Every operation returns a handle with `wait()`, which has the run's deadline. `send` and `receive` start at once. Every
worker has to call the other operations, in the same order; they start when all workers have called them. A call that
only some workers make is refused on all of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.base import Pending


class Messages:
    """Point-to-point and collective messages over the run's connection.

    Args:
        transport: the connection.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, x: Tensor, to: int) -> Pending:
        """Send `x`, any shape and dtype, to worker `to`, who has to `receive` it; `x` stays untouched until waited."""
        return self._transport.send(x, to)

    def receive(self, x: Tensor, source: int) -> Pending:
        """Fill `x` with the next tensor that worker `source` sends to this one; same shape and dtype as there."""
        return self._transport.receive(x, source)

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        """Copy the `x` of worker `source` into `x` of every worker, in place."""
        self._meet("broadcast(..)")
        return self._transport.broadcast(x, source)

    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` over all workers, in place."""
        self._meet("all_reduce(..)")
        return self._transport.all_reduce(x)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (N, ..): row i is `x` of worker i."""
        self._meet("all_gather(..)")
        return self._transport.all_gather(out, x)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's `value` (anything that JSON can say), in rank order; waits."""
        with self._transport.calling("run.messages.gather(..)"):
            return self._transport.gather_json(value)

    def barrier(self) -> None:
        """Return when every worker has called it."""
        self._meet("barrier()")

    def _meet(self, call: str) -> None:
        """Wait until all workers make this call."""
        with self._transport.calling(f"run.messages.{call}"):
            self._transport.meet()
