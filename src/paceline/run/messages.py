# SPDX-License-Identifier: Apache-2.0
"""Messages of the user's own between workers: `run.messages`.

Every operation is answered by something to `wait()` for, with the run's deadline. `send` and `receive` start at once;
all others have to be called by every worker, in the same order, and start when all have come. A call that only some
workers make is refused on all of them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from paceline.communication import Transport
from paceline.communication.base import Pending


class Messages:
    """Point to point and among all, over the run's connection.

    Args:
        transport: the connection.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def send(self, x: Tensor, to: int) -> Pending:
        """Send `x`, any shape and dtype, to worker `to`, who has to `receive` it; `x` stays untouched until waited."""
        return self._transport.send(x, to)

    def receive(self, x: Tensor, source: int) -> Pending:
        """Fill `x` with what worker `source` sends next to this one; same shape and dtype as there."""
        return self._transport.receive(x, source)

    def broadcast(self, x: Tensor, source: int = 0) -> Pending:
        """Make `x` what it is on worker `source`, in place."""
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
        """Return when every worker has come here."""
        self._meet("barrier()")

    def _meet(self, call: str) -> None:
        """Wait until all workers make this call."""
        with self._transport.calling(f"run.messages.{call}"):
            self._transport.meet()
