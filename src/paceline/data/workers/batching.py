# SPDX-License-Identifier: Apache-2.0
"""Tickets go to loader processes in blocks, and batches come back in order.

A small batch costs a process more to send than to make, so several go together. A block starts as one batch and
doubles in every step. It is at most

- 64 batches,
- about 1 MiB: measured batches set the number, and a process ends a block early where it outgrows that,
- what the training uses up, or what a process makes, in a tenth of a second: where a step takes longer than that, or
  a batch does, batches go one by one, so that no process holds tickets long before use.

At most prefetch_factor x num_workers blocks are under way, as many as a `DataLoader` would have batches. So memory is
at most what a `DataLoader` holds and 1 MiB for each of them, twice that where batches suddenly grow.
"""

from __future__ import annotations

import bisect
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.data.workers.message import IpcBatch
from paceline.data.workers.pack import BLOCK_BYTES

MOST_BATCHES = 64
BLOCK_S = 0.1


@dataclass(frozen=True)
class BatchRequest:
    """One batch to make.

    Attributes:
        epoch: together with a sample's id it seeds what is random in the sample.
        ids: what the user's dataset is indexed with, one for each sample.
    """

    epoch: int
    ids: Sequence[Any]


class RequestBlocks:
    """Cuts the tickets of one pass into blocks, as the inner loader asks for them.

    A block may come back with its last batches not made. They are asked for again before any new ticket is drawn, and
    while a block is out that may come back so, the inner loader is kept going with empty blocks.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self._out: deque[tuple[int, list[BatchRequest]]] = (
            deque()
        )  # (number of its first ticket, block), as they were sent
        self._again: list[tuple[int, list[BatchRequest]]] = []  # sorted
        self._drawn, self._ended = 0, False
        self.size = 1
        self.error: Exception | None = None  # that drawing a ticket raised

    def __iter__(self) -> Iterator[list[BatchRequest]]:
        return self

    def __next__(self) -> list[BatchRequest]:
        if self._again:
            first, block = self._again.pop(0)
            if len(block) > self.size:
                self._again.insert(0, (first + self.size, block[self.size :]))
                block = block[: self.size]
        else:
            first, block = self._drawn, self._draw()
            self._drawn += len(block)
        if not block and not any(sent for _, sent in self._out):
            raise StopIteration
        self._out.append((first, block))
        return block

    def _draw(self) -> list[BatchRequest]:
        """Up to `size` tickets; fewer where the source is slow or at its end."""
        block: list[BatchRequest] = []
        began = time.monotonic()
        while not self._ended and len(block) < self.size and (not block or time.monotonic() - began < BLOCK_S):
            try:
                block.append(next(self._requests))
            except StopIteration:
                self._ended = True
            except Exception as error:
                self.error, self._ended = error, True
        return block

    def came(self, ipc_batch: IpcBatch) -> int:
        """The block that was sent first came back: the number of its first ticket."""
        first, block = self._out.popleft()
        missing = block[len(ipc_batch) :]
        if missing:
            bisect.insort(self._again, (first + len(ipc_batch), missing), key=lambda sent: sent[0])
        return first

    def adapt(self, ipc_batch: IpcBatch, batch_s: float | None) -> None:
        """The next block's size from what came and from the seconds that a batch lasts (None: not known yet).

        A process gets half of the time after which it would end the block early.
        """
        count = len(ipc_batch)
        most = min(MOST_BATCHES, 2 * self.size, BLOCK_BYTES * count // max(1, ipc_batch.nbytes))
        for limit_s, took_s in ((BLOCK_S / 2, ipc_batch.made_s / count), (BLOCK_S, batch_s)):
            if took_s:
                most = min(most, int(limit_s / took_s))
        self.size = max(1, most)


class OrderedBatches:
    """Batches of one pass, in order, out of parcels that may come in parts."""

    def __init__(self, blocks: RequestBlocks, ipc_batches: Iterator[IpcBatch]) -> None:
        self._blocks, self._ipc_batches = blocks, ipc_batches
        self._early: dict[int, IpcBatch] = {}  # by the number of the first ticket
        self._number, self._index = 0, 0  # of the next ticket: in the pass, in its parcel
        self._ipc_batch: IpcBatch | None = None
        self._came_at: float | None = None  # when the parcel in hand was reached
        self._handed_out = 0  # since then

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._ipc_batch is None or self._index == len(self._ipc_batch):
            self._ipc_batch = None  # its memory is free before more comes
            self._ipc_batch, self._index = self._following(), 0
        index = self._index
        self._index, self._number, self._handed_out = index + 1, self._number + 1, self._handed_out + 1
        return self._ipc_batch.batch(index)

    def _following(self) -> IpcBatch:
        """The parcel that begins with the next ticket; receives until it is there."""
        while self._number not in self._early:
            self._receive()
        return self._early.pop(self._number)

    def _receive(self) -> None:
        try:
            ipc_batch = next(self._ipc_batches)
        except StopIteration:
            error, self._blocks.error = self._blocks.error, None
            if error is not None:
                raise error from None
            raise
        except Exception as error:
            # Which block that was cannot be told, so the pass is over. The traceback holds the inner iterator; without
            # both the processes end.
            self._ipc_batches = iter(())
            raise error.with_traceback(None)  # noqa: B904
        first = self._blocks.came(ipc_batch)
        if not len(ipc_batch):
            return
        now = time.monotonic()
        pace = (now - self._came_at) / self._handed_out if self._came_at is not None and self._handed_out else None
        self._came_at, self._handed_out = now, 0
        self._blocks.adapt(ipc_batch, pace)
        self._early[first] = ipc_batch
