# SPDX-License-Identifier: Apache-2.0
"""Sends batch requests to loader processes in blocks, and returns the batches in order.

A process takes longer to send a small batch than to make it, so it sends several at once. A block starts at one batch
and doubles each time. It is at most

- 64 batches,
- about 1 MiB: measured batches set the number, and a process ends a block early that outgrows it,
- what the training consumes, or a process makes, in 0.1 s: if a step or a batch takes longer, batches go one by one,
  so that no process holds requests long before their use.

At most prefetch_factor x num_workers blocks are pending, as many as a `DataLoader` would have batches. So memory is at
most that of a `DataLoader` plus 1 MiB for each block, or 2 MiB if batches suddenly grow.

Every tensor that a process sends by itself costs a message, a file of shared memory and a descriptor, whatever its
size. So a block is pickled into one message, with its small tensors in it.

The batches are those of a bare `DataLoader`, but for this: small tensors of a batch that shared memory with each other
(a tensor and a slice of it) come out as separate tensors; the same tensor twice comes out as the same tensor twice.
"""

from __future__ import annotations

import bisect
import io
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

MOST_BATCHES = 64
BLOCK_S = 0.1
BLOCK_BYTES = 1024 * 1024
"""The most bytes of a block."""
PROTOCOL = 5
"""The first that has `bytearray`, in which the bytes of a tensor arrive to be written."""
LARGE_BYTES = BLOCK_BYTES // 2
"""A larger tensor is sent separately: shared memory costs it one copy less."""


@dataclass
class IpcBatch:
    """Several batches that came in one message."""

    items: list[Any]  # each batch, or its error
    nbytes: int  # of all batches, including tensors that are sent separately
    made_s: float  # that making them took

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: int) -> Any:
        """The `index`-th batch; if making or pinning it failed, raises the error of the bare `DataLoader`."""
        item = self.items[index]
        if isinstance(item, ExceptionWrapper):
            try:
                item.reraise()  # type: ignore[no-untyped-call]
            except BaseException as error:
                # The traceback is a reference cycle, which would keep all callers and the loader processes alive until
                # the next garbage collection.
                raise error.with_traceback(None)  # noqa: B904
        return item

    def pin_memory(self) -> IpcBatch:
        """The same in page-locked memory; the `DataLoader`'s pinning thread calls this."""
        return IpcBatch([_pinned(item) for item in self.items], self.nbytes, self.made_s)


def _pinned(item: Any) -> Any:
    from torch.utils.data._utils.pin_memory import pin_memory

    if isinstance(item, ExceptionWrapper):
        return item
    try:
        return pin_memory(item)  # type: ignore[no-untyped-call]
    except Exception:
        return ExceptionWrapper(where="in pin memory thread")  # type: ignore[no-untyped-call]


class Packer:
    """Packs the batches of one block, in a loader process; it arrives as an :class:`IpcBatch`."""

    def __init__(self) -> None:
        self.nbytes, self.made_s = 0, 0.0  # of all batches, and the seconds that making them took
        self._items: list[bytes | ExceptionWrapper] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, batch: Any) -> None:
        """Pack a copy of a batch.

        If it cannot be pickled (a tensor of an autograd graph), the error comes here: the thread that sends would lose
        it.
        """
        file = io.BytesIO()
        pickler = _BatchPickler(file, PROTOCOL)
        pickler.dump(batch)
        self._items.append(file.getvalue())
        self.nbytes += file.tell() + pickler.apart

    def add_error(self, error: ExceptionWrapper) -> None:
        """Add an error in place of its batch."""
        self._items.append(error)

    def __reduce__(self) -> Any:
        return _arrived, (self._items, self.nbytes, self.made_s)


def _arrived(items: list[bytes | ExceptionWrapper], nbytes: int, made_s: float) -> IpcBatch:
    """The message of our own loader process, which takes over its descriptors at once, as a `DataLoader` does."""
    return IpcBatch([ForkingPickler.loads(item) if isinstance(item, bytes) else item for item in items], nbytes, made_s)


class _BatchPickler(ForkingPickler):
    """Pickles a batch as a `DataLoader` does, but for small plain tensors, whose bytes go into the message."""

    inside = apart = 0  # bytes of the tensors in the message, and of those that are sent separately

    def reducer_override(self, value: Any) -> Any:
        """Called for every object that is no plain container or scalar."""
        if type(value) is not Tensor:
            return NotImplemented
        if value.is_conj() or value.is_neg():  # shared memory would lose this bit
            return torch.resolve_conj, (value.resolve_conj().resolve_neg(),)
        nbytes = value.numel() * value.element_size()
        if nbytes > LARGE_BYTES or self.inside + nbytes > BLOCK_BYTES or not _is_plain(value):
            self.apart += nbytes
            return NotImplemented
        self.inside += nbytes
        raw = bytearray(value.detach().view(-1).view(torch.uint8).numpy() if nbytes else b"")
        return _tensor, (raw, value.dtype, tuple(value.shape), value.requires_grad)


def _is_plain(tensor: Tensor) -> bool:
    """Whether its bytes are all there is to it."""
    if tensor.layout is not torch.strided or tensor.device.type != "cpu" or tensor.is_quantized or tensor.is_nested:
        return False
    if not tensor.is_contiguous() or any(getattr(tensor, "names", ())):
        return False
    return tensor.is_leaf or not tensor.requires_grad


def _tensor(raw: bytearray, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool) -> Tensor:
    """In memory of its own, so that saving or changing one tensor leaves the others alone."""
    flat = torch.frombuffer(raw, dtype=dtype) if len(raw) else torch.empty(0, dtype=dtype)
    return flat.view(shape).requires_grad_(requires_grad)


# -- how many batches go together, and their order -----------------------------------------------


@dataclass(frozen=True)
class BatchRequest:
    """One batch to make."""

    epoch: int  # with a sample's index, the seed of the sample's randomness
    ids: Sequence[Any]  # index of each sample in the user's dataset


class RequestBlocks:
    """Cuts the requests of one pass into blocks, as the inner loader asks for them.

    A block may return without its last batches. They are requested again before any new one, and while such a block
    may still return, the inner loader gets empty blocks.
    """

    def __init__(self, requests: Iterator[BatchRequest]) -> None:
        self._requests = requests
        self._out: deque[tuple[int, list[BatchRequest]]] = deque()  # (number of the first request, block), as sent
        self._again: list[tuple[int, list[BatchRequest]]] = []  # sorted
        self._drawn, self._ended = 0, False
        self.size = 1
        self.error: Exception | None = None  # raised by the iterator of requests

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
        """Up to `size` requests; fewer if their iterator is slow or ends."""
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
        """The oldest pending block returned; returns the number of its first request."""
        first, block = self._out.popleft()
        missing = block[len(ipc_batch) :]
        if missing:
            bisect.insort(self._again, (first + len(ipc_batch), missing), key=lambda sent: sent[0])
        return first

    def adapt(self, ipc_batch: IpcBatch, batch_s: float | None) -> None:
        """Set the next block's size from a returned block and the seconds that training takes for a batch, if known.

        A block may take a process half of the time after which the process would end it early.
        """
        count = len(ipc_batch)
        most = min(MOST_BATCHES, 2 * self.size, BLOCK_BYTES * count // max(1, ipc_batch.nbytes))
        for limit_s, took_s in ((BLOCK_S / 2, ipc_batch.made_s / count), (BLOCK_S, batch_s)):
            if took_s:
                most = min(most, int(limit_s / took_s))
        self.size = max(1, most)


class OrderedBatches:
    """The batches of one pass in order, from blocks that may return incomplete."""

    def __init__(self, blocks: RequestBlocks, ipc_batches: Iterator[IpcBatch]) -> None:
        self._blocks, self._ipc_batches = blocks, ipc_batches
        self._early: dict[int, IpcBatch] = {}  # by the number of the first request
        self._number, self._index = 0, 0  # of the next request: in the pass, in `_ipc_batch`
        self._ipc_batch: IpcBatch | None = None
        self._came_at: float | None = None  # when `_ipc_batch` was reached
        self._handed_out = 0  # since then

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while self._ipc_batch is None or self._index == len(self._ipc_batch):
            self._ipc_batch = None  # its memory is free before more comes
            while self._number not in self._early:  # the block that begins with the next request
                self._receive()
            self._ipc_batch, self._index = self._early.pop(self._number), 0
        index = self._index
        self._index, self._number, self._handed_out = index + 1, self._number + 1, self._handed_out + 1
        return self._ipc_batch.batch(index)

    def _receive(self) -> None:
        try:
            ipc_batch = next(self._ipc_batches)
        except StopIteration:
            error, self._blocks.error = self._blocks.error, None
            if error is not None:
                raise error from None
            raise
        except Exception as error:
            # The failed block is unknown, so the pass is over. Drop the iterator and the traceback, which holds it too,
            # so that the processes end.
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
