# SPDX-License-Identifier: Apache-2.0
"""Several batches in one message from a loader process.

Every tensor that a process sends costs a message, a file of shared memory and a descriptor, whatever its size. So the
process concatenates the tensors and arrays of all batches of a block, each at a multiple of 64 bytes, replaces them by
their offsets, and sends one message. The training process takes views.

The batches are those of a bare `DataLoader`, but for this:

- The memory of a block, about 1 MiB, lives as long as one tensor of one of its batches. No two tensors overlap:
  writing into one batch changes no other.
- Tensors of a batch that shared memory with each other (a tensor and a slice of it) come out as separate tensors; the
  same tensor twice comes out as the same tensor twice.

:mod:`paceline.data.workers.pack` says what is packed, and what the `DataLoader` sends itself.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper


class PackedArray(NamedTuple):
    """Stands for a tensor or an array: its offset and layout."""

    begin: int
    end: int
    dtype: Any  # torch's or NumPy's
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # if not contiguous
    requires_grad: bool = False


class PackedTuple(NamedTuple):
    """Stands for a named tuple, whose class might not accept a `PackedArray`."""

    kind: Any
    parts: list[Any]


@dataclass
class IpcBatch:
    """Several batches in one message.

    Attributes:
        items: for each batch its packed structure, or its error; once pinned, the batch itself.
        data: the concatenated bytes of all tensors and arrays.
        nbytes: of all batches, including tensors that are sent separately.
        made_s: seconds that making them took.
        pinned: whether `data` is page-locked and the batches are unpacked.
    """

    items: list[Any]
    data: Any
    nbytes: int
    made_s: float
    pinned: bool = False

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: int) -> Any:
        """The `index`-th batch; call it once.

        Raises:
            Exception: making or pinning this batch failed; the error is that of the bare `DataLoader`.
        """
        item = self.items[index]
        if isinstance(item, ExceptionWrapper):
            _reraise(item)
        return item if self.pinned else self._filled(item)

    def pin_memory(self) -> IpcBatch:
        """The same with the batches unpacked in page-locked memory; the `DataLoader`'s pinning thread calls this."""
        pinned = replace(self, data=self._tensor().pin_memory(), pinned=True)
        return replace(pinned, items=[pinned._pinned_item(item) for item in self.items])

    def _pinned_item(self, item: Any) -> Any:
        from torch.utils.data._utils.pin_memory import pin_memory

        if isinstance(item, ExceptionWrapper):
            return item
        try:
            return pin_memory(self._filled(item))  # type: ignore[no-untyped-call]
        except Exception:
            return ExceptionWrapper(where="in pin memory thread")  # type: ignore[no-untyped-call]

    def _tensor(self) -> Tensor:
        """All bytes, in writable memory; (n,) uint8."""
        if not isinstance(self.data, Tensor):
            arrived = np.frombuffer(self.data, dtype=np.uint8)
            self.data = torch.empty(len(arrived), dtype=torch.uint8)  # aligned, unlike bytes from a pipe
            self.data.numpy()[:] = arrived
        return self.data

    def _filled(self, item: Any) -> Any:
        return _Unpacker(self._tensor(), self.pinned).fill(item)


class _Unpacker:
    """Restores the tensors and arrays of one batch."""

    def __init__(self, data: Tensor, pinned: bool) -> None:
        self._data, self._view, self._pinned = data, memoryview(data.numpy()), pinned  # type: ignore[arg-type,unused-ignore]
        self._filled: dict[int, Any] = {}  # by id, so that the same tensor twice stays the same

    def fill(self, value: Any) -> Any:
        """The structure before packing."""
        kind = type(value)
        if kind is PackedArray:
            if id(value) not in self._filled:
                self._filled[id(value)] = self._content(value)
            return self._filled[id(value)]
        if kind is dict:
            return {key: self.fill(part) for key, part in value.items()}
        if kind is list:
            return [self.fill(part) for part in value]
        if kind is tuple:
            return tuple([self.fill(part) for part in value])
        if kind is PackedTuple:
            return value.kind._make([self.fill(part) for part in value.parts])
        if isinstance(value, MutableMapping):
            value.update({key: self.fill(part) for key, part in value.items()})
        return value

    def _content(self, slot: PackedArray) -> Any:
        if not isinstance(slot.dtype, torch.dtype):
            return np.frombuffer(self._view[slot.begin : slot.end], dtype=slot.dtype).reshape(slot.shape)
        if slot.begin == slot.end:
            tensor = torch.empty(slot.shape, dtype=slot.dtype)
        else:
            flat = self._flat(slot)
            tensor = flat.view(slot.shape) if slot.stride is None else flat.as_strided(slot.shape, slot.stride)
        return tensor.requires_grad_() if slot.requires_grad else tensor

    def _flat(self, slot: PackedArray) -> Tensor:
        """The elements of a tensor, (n,).

        A page-locked tensor keeps PyTorch's storage, else PyTorch would reuse the memory before a copy to a device
        ends. Other tensors get a storage of their own, so that saving or resizing one leaves its neighbours alone.
        """
        if self._pinned:
            return self._data[slot.begin : slot.end].data.view(slot.dtype)  # `.data`: with a version of its own
        return torch.frombuffer(self._view[slot.begin : slot.end], dtype=slot.dtype)


def _reraise(wrapped: ExceptionWrapper) -> None:
    try:
        wrapped.reraise()  # type: ignore[no-untyped-call]
    except BaseException as error:
        # The traceback is a reference cycle, which would keep all callers and the loader processes alive until the
        # next garbage collection.
        raise error.with_traceback(None)  # noqa: B904
