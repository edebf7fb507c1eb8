# SPDX-License-Identifier: Apache-2.0
"""Several batches in one message from a loader process.

Every tensor that a process sends by itself costs a message, a file of shared memory and a descriptor, whatever its
size. So a process pickles several batches into one message, with their small tensors in it.

The batches are those of a bare `DataLoader`, but for this: small tensors of a batch that shared memory with each other
(a tensor and a slice of it) come out as separate tensors; the same tensor twice comes out as the same tensor twice.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

BLOCK_BYTES = 1024 * 1024
"""The most bytes of a block."""
PROTOCOL = 5
"""The first that has `bytearray`, in which the bytes of a tensor arrive to be written."""
LARGE_BYTES = BLOCK_BYTES // 2
"""A larger tensor is sent separately: shared memory costs it one copy less."""


@dataclass
class IpcBatch:
    """Several batches that came in one message.

    Attributes:
        items: each batch, or its error.
        nbytes: of all batches, including tensors that are sent separately.
        made_s: seconds that making them took.
    """

    items: list[Any]
    nbytes: int
    made_s: float

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: int) -> Any:
        """The `index`-th batch.

        Raises:
            Exception: making or pinning this batch failed; the error is that of the bare `DataLoader`.
        """
        item = self.items[index]
        if isinstance(item, ExceptionWrapper):
            _reraise(item)
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


def _reraise(wrapped: ExceptionWrapper) -> None:
    try:
        wrapped.reraise()  # type: ignore[no-untyped-call]
    except BaseException as error:
        # The traceback is a reference cycle, which would keep all callers and the loader processes alive until the
        # next garbage collection.
        raise error.with_traceback(None)  # noqa: B904


class Packer:
    """Packs the batches of one block, in a loader process; it arrives as an :class:`IpcBatch`.

    Attributes:
        nbytes: bytes packed, including tensors that are sent separately.
        made_s: seconds that making the batches took.
    """

    def __init__(self) -> None:
        self.nbytes, self.made_s = 0, 0.0
        self._items: list[bytes | ExceptionWrapper] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, batch: Any) -> None:
        """Pack a copy of a batch.

        An error comes here, at its batch, while the thread that sends would lose it.

        Raises:
            Exception: the batch cannot be pickled, such as a tensor that is part of an autograd graph.
        """
        file = io.BytesIO()
        pickler = _BatchPickler(file, PROTOCOL)
        pickler.dump(batch)
        self._items.append(file.getvalue())
        self.nbytes += file.tell() + pickler.apart

    def add_error(self, error: ExceptionWrapper) -> None:
        """Add an error in place of its batch."""
        self._items.append(error)

    def took(self, made_s: float) -> Packer:
        """Making these batches took so many seconds."""
        self.made_s = made_s
        return self

    def __reduce__(self) -> Any:
        return _arrived, (self._items, self.nbytes, self.made_s)


def _arrived(items: list[bytes | ExceptionWrapper], nbytes: int, made_s: float) -> IpcBatch:
    """The message of our own loader process, which takes over its descriptors at once, as a `DataLoader` does."""
    return IpcBatch([ForkingPickler.loads(item) if isinstance(item, bytes) else item for item in items], nbytes, made_s)


class _BatchPickler(ForkingPickler):
    """Pickles a batch as a `DataLoader` does, but for small plain tensors, whose bytes go into the message.

    Attributes:
        apart: bytes of the tensors that are sent separately.
    """

    inside = apart = 0

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
