# SPDX-License-Identifier: Apache-2.0
"""`run.messages`: messages of the user's program between workers.

Every operation returns a handle with `wait()`, which has the run's deadline. `send` and `receive` start at once. The
other operations are collective: every worker calls them in the same order, and they start when all workers have. A call
that only some workers make is refused on all.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.base import Pending


class Messages:
    """Point-to-point and collective messages over the run's connection."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, x: Tensor, to: int) -> Pending:
        """Send `x`, any shape and dtype, to worker `to`, which has to `receive` it; do not change `x` before `wait`."""
        return self._transport.send(x, to)

    def receive(self, x: Tensor, source: int) -> Pending:
        """Fill `x` with the next tensor that worker `source` sends to this one, of the same shape and dtype."""
        return self._transport.receive(x, source)

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        """Copy the `x` of worker `source` into `x` of every worker, in place."""
        self._all_call("broadcast(..)")
        return self._transport.broadcast(x, source)

    def all_reduce(self, x: Tensor) -> Pending:
        """Sum `x` over all workers, in place."""
        self._all_call("all_reduce(..)")
        return self._transport.all_reduce(x)

    def all_gather(self, out: Tensor, x: Tensor) -> Pending:
        """`out`, shape (N, ..): row i is `x` of worker i."""
        self._all_call("all_gather(..)")
        return self._transport.all_gather(out, x)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's `value` (serializable as JSON), in rank order; waits."""
        with self._transport.calling("run.messages.gather(..)"):
            return self._transport.gather_json(value)

    def barrier(self) -> None:
        """Return when every worker has called it."""
        self._all_call("barrier()")

    def _all_call(self, call: str) -> None:
        """Wait until all workers make this call."""
        with self._transport.calling(f"run.messages.{call}"):
            self._transport.meet()
