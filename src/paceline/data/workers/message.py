# SPDX-License-Identifier: Apache-2.0
"""Parcels: several batches in one message from a loader process.

A tensor that a process sends costs a message, a file of shared memory and a descriptor of its own, whatever its size.
So the process lays the tensors and arrays of all batches of a block end to end, each at a multiple of 64 bytes, puts
into their places where they lie, and sends all as one parcel. The training process takes views.

What comes out is what a bare `DataLoader` would give, but for this:

- The memory of a block, about 1 MiB, lives as long as one tensor of one of its batches. No two tensors overlap:
  writing into one batch changes no other.
- Tensors of a batch that shared memory with each other (a tensor and a slice of it) come out as separate tensors; the
  same tensor twice comes out as the same tensor twice.

What is packed, and what a `DataLoader` sends as it always does, is said in :mod:`paceline.data.workers.pack`.
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
    """In the place of a tensor or an array: where its bytes lie and what they mean."""

    begin: int
    end: int
    dtype: Any  # torch's or NumPy's
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # where it is not the usual one
    requires_grad: bool = False


class PackedTuple(NamedTuple):
    """In the place of a named tuple, whose own class might not take slots."""

    kind: Any
    parts: list[Any]


@dataclass
class IpcBatch:
    """Several batches in one message.

    Attributes:
        items: for each batch its structure with slots, or the error in its place; once pinned the batch itself.
        data: the bytes of all tensors and arrays, end to end.
        nbytes: of all batches, those of tensors that travel by themselves included.
        made_s: seconds that it took to make them.
        pinned: `data` is in page-locked memory and the batches are filled.
    """

    items: list[Any]
    data: Any
    nbytes: int
    made_s: float
    pinned: bool = False

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: int) -> Any:
        """The `index`-th batch; to be asked for once.

        Raises:
            Exception: the error that making or pinning this batch met, as the bare `DataLoader` raises it.
        """
        item = self.items[index]
        if isinstance(item, ExceptionWrapper):
            _reraise(item)
        return item if self.pinned else self._filled(item)

    def pin_memory(self) -> IpcBatch:
        """The same with the batches filled in page-locked memory; `DataLoader`'s thread for that calls it."""
        pinned = replace(self, data=self._tensor().pin_memory(), pinned=True)
        return replace(pinned, items=[pinned._pinned_item(item) for item in self.items])

    def _pinned_item(self, item: Any) -> Any:
        from torch.utils.data._utils.pin_memory import pin_memory

        if isinstance(item, ExceptionWrapper):
            return item
        try:
            return pin_memory(self._filled(item))  # type: ignore[no-untyped-call]  # what is pinned stays as it is
        except Exception:
            return ExceptionWrapper(where="in pin memory thread")  # type: ignore[no-untyped-call]

    def _tensor(self) -> Tensor:
        """All bytes, in memory that may be written; (n,) uint8."""
        if not isinstance(self.data, Tensor):
            arrived = np.frombuffer(self.data, dtype=np.uint8)
            self.data = torch.empty(len(arrived), dtype=torch.uint8)  # aligned, which what came from a pipe is not
            self.data.numpy()[:] = arrived
        return self.data

    def _filled(self, item: Any) -> Any:
        return _Unpacker(self._tensor(), self.pinned).fill(item)


class _Unpacker:
    """Puts tensors and arrays into the slots of one batch."""

    def __init__(self, data: Tensor, pinned: bool) -> None:
        self._data, self._view, self._pinned = data, memoryview(data.numpy()), pinned  # type: ignore[arg-type,unused-ignore]
        self._filled: dict[int, Any] = {}  # by the id of the slot: the same tensor twice stays the same

    def fill(self, value: Any) -> Any:
        """The structure as it was before it was packed."""
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
            found = torch.empty(slot.shape, dtype=slot.dtype)
        else:
            flat = self._flat(slot)
            found = flat.view(slot.shape) if slot.stride is None else flat.as_strided(slot.shape, slot.stride)
        return found.requires_grad_() if slot.requires_grad else found

    def _flat(self, slot: PackedArray) -> Tensor:
        """The elements of a tensor, (n,).

        PyTorch must know a page-locked tensor's storage, or it would reuse the memory before a copy to a device has
        ended. Other tensors get a storage of their own, so that saving or resizing one does not touch its neighbours.
        """
        if self._pinned:
            return self._data[slot.begin : slot.end].data.view(slot.dtype)  # `.data`: with a version of its own
        return torch.frombuffer(self._view[slot.begin : slot.end], dtype=slot.dtype)


def _reraise(wrapped: ExceptionWrapper) -> None:
    try:
        wrapped.reraise()  # type: ignore[no-untyped-call]
    except BaseException as error:
        # The frame that raised it holds the error: that circle would keep all callers, and with them the loader
        # processes, until the garbage collector comes.
        raise error.with_traceback(None)  # noqa: B904
