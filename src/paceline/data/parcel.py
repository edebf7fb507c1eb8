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

Looked into are dicts and other mutable mappings, lists, tuples and named tuples. Left as they are, for the
`DataLoader` to send as it always does: tensors of more than 512 KiB (they lie in shared memory already, so packing
would be one more copy), tensors with gaps or overlaps in memory, sparse, quantised, nested, named and conjugate ones,
subclasses, what is not on the CPU, and objects of any other type. A batch with such an object is sent alone, because
nobody knows its size.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

ALIGNMENT = 64
BLOCK_BYTES = 1024 * 1024
"""A block shall not outgrow this."""
LARGE_BYTES = BLOCK_BYTES // 2
"""A tensor of more than this travels by itself."""
INLINE_BYTES = 2 * BLOCK_BYTES
"""A parcel of at most this goes through the pipe, which is quicker than to make, send and map a file."""
SCALARS = frozenset({int, float, complex, bool, type(None)})


class _Slot(NamedTuple):
    """In the place of a tensor or an array: where its bytes lie and what they mean."""

    begin: int
    end: int
    dtype: Any  # torch's or NumPy's
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None  # where it is not the usual one
    requires_grad: bool = False


class _Node(NamedTuple):
    """In the place of a named tuple, whose own class might not take slots."""

    kind: Any
    parts: list[Any]


class Packer:
    """Gathers the batches of one block.

    Attributes:
        nbytes: bytes gathered, those of tensors that travel by themselves included.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._data = bytearray()
        self._items: list[Any] = []
        self._slots: dict[int, _Slot] = {}  # by the id of the tensor or array of the batch in hand

    def __len__(self) -> int:
        return len(self._items)

    def add(self, batch: Any) -> None:
        """Take a copy of a batch.

        Raises:
            RuntimeError: a tensor in it is part of a graph of gradients; the parcel is as it was before.
        """
        mark = len(self._data)
        try:
            item = self._strip(batch)
        except BaseException:
            del self._data[mark:]
            raise
        finally:
            self._slots.clear()
        self._items.append(item)
        self.nbytes += len(self._data) - mark

    def add_error(self, error: ExceptionWrapper) -> None:
        """In the place of a batch that could not be made."""
        self._items.append(error)

    def parcel(self, left: int = 0) -> Parcel:
        """What was gathered, ready to be sent; `left` batches of the block were not made."""
        data: Any = self._data
        if len(data) > INLINE_BYTES:
            data = torch.frombuffer(data, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        return Parcel(self._items, data, self.nbytes, left)

    def _strip(self, value: Any) -> Any:
        """The same structure with slots for what went into the parcel."""
        kind = type(value)
        if kind in SCALARS:
            return value
        if isinstance(value, Tensor):
            return self._tensor(value)
        if kind is np.ndarray:
            return self._array(value)
        if kind is dict:
            return {key: self._strip(part) for key, part in value.items()}
        if kind is list:
            return [self._strip(part) for part in value]
        if kind is tuple:
            return tuple([self._strip(part) for part in value])
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return _Node(kind, [self._strip(part) for part in value])
        if isinstance(value, MutableMapping):
            return self._mapping(value)
        self.nbytes += len(value) if kind in (str, bytes) else _bytes_of_object(value)
        return value

    def _mapping(self, value: MutableMapping[Any, Any]) -> Any:
        """A copy keeps what such a mapping has beside its items."""
        parts = {key: self._strip(part) for key, part in value.items()}
        stripped = copy.copy(value)
        stripped.update(parts)
        return stripped

    def _tensor(self, tensor: Tensor) -> Any:
        if id(tensor) in self._slots:
            return self._slots[id(tensor)]
        layout = _layout(tensor)
        if layout is None:
            self.nbytes += _bytes_of(tensor)
            return _sendable(tensor)
        flat, stride = layout
        raw = flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
        begin, end = self._lay(raw)
        slot = _Slot(begin, end, tensor.dtype, tuple(tensor.shape), stride, tensor.requires_grad)
        self._slots[id(tensor)] = slot
        return slot

    def _array(self, array: Any) -> Any:
        if array.dtype.kind not in "biufc" or not array.flags.c_contiguous or not array.flags.writeable:
            self.nbytes += _bytes_of_object(array) if array.dtype.hasobject else array.nbytes
            return array
        if id(array) not in self._slots:
            begin, end = self._lay(array.reshape(-1).view(np.uint8))
            self._slots[id(array)] = _Slot(begin, end, array.dtype, array.shape)
        return self._slots[id(array)]

    def _lay(self, raw: Any) -> tuple[int, int]:
        """Put bytes at the end: where they begin and end."""
        self._data += bytes(-len(self._data) % ALIGNMENT)
        begin = len(self._data)
        self._data += memoryview(raw)
        return begin, len(self._data)


@dataclass
class Parcel:
    """Several batches in one message.

    Attributes:
        items: for each batch its structure with slots, or the error in its place; once pinned the batch itself.
        data: the bytes of all tensors and arrays, end to end.
        nbytes: as :class:`Packer` says.
        left: batches of the block, the last ones, that were not made.
        pinned: `data` is in page-locked memory and the batches are filled.
    """

    items: list[Any]
    data: Any
    nbytes: int
    left: int
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

    def pin_memory(self) -> Parcel:
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
        return _Filler(self._tensor(), self.pinned).fill(item)


class _Filler:
    """Puts tensors and arrays into the slots of one batch."""

    def __init__(self, data: Tensor, pinned: bool) -> None:
        self._data, self._view, self._pinned = data, memoryview(data.numpy()), pinned  # type: ignore[arg-type,unused-ignore]
        self._filled: dict[int, Any] = {}  # by the id of the slot: the same tensor twice stays the same

    def fill(self, value: Any) -> Any:
        """The structure as it was before it was packed."""
        kind = type(value)
        if kind is _Slot:
            if id(value) not in self._filled:
                self._filled[id(value)] = self._content(value)
            return self._filled[id(value)]
        if kind is dict:
            return {key: self.fill(part) for key, part in value.items()}
        if kind is list:
            return [self.fill(part) for part in value]
        if kind is tuple:
            return tuple([self.fill(part) for part in value])
        if kind is _Node:
            return value.kind._make([self.fill(part) for part in value.parts])
        if isinstance(value, MutableMapping):
            value.update({key: self.fill(part) for key, part in value.items()})
        return value

    def _content(self, slot: _Slot) -> Any:
        if not isinstance(slot.dtype, torch.dtype):
            return np.frombuffer(self._view[slot.begin : slot.end], dtype=slot.dtype).reshape(slot.shape)
        if slot.begin == slot.end:
            found = torch.empty(slot.shape, dtype=slot.dtype)
        else:
            flat = self._flat(slot)
            found = flat.view(slot.shape) if slot.stride is None else flat.as_strided(slot.shape, slot.stride)
        return found.requires_grad_() if slot.requires_grad else found

    def _flat(self, slot: _Slot) -> Tensor:
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


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor; an error here surfaces at its batch, later it would be lost in the thread that sends."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            f"a batch holds a tensor of shape {tuple(tensor.shape)} that is part of a graph of gradients, which cannot "
            "be sent from a loader process; detach() it in the dataset or in collate_fn"
        )
    return tensor


def _layout(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None] | None:
    """(the tensor's elements in the order of memory, its strides where they are not the usual ones), or None."""
    if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return None
    if any(getattr(tensor, "names", ())) or tensor.is_quantized or tensor.is_nested:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    if (tensor.requires_grad and not tensor.is_leaf) or tensor.numel() * tensor.element_size() > LARGE_BYTES:
        return None
    plain = tensor.detach()
    if plain.is_contiguous():
        return plain.view(-1), None
    dense = plain.clone()  # keeps the strides of a tensor without gaps and overlaps
    if dense.stride() != plain.stride():
        return None
    return dense.as_strided((dense.numel(),), (1,)), plain.stride()


def _bytes_of(tensor: Tensor) -> int:
    """Bytes of a tensor of any kind, at least about."""
    if tensor.layout is torch.sparse_coo:
        return sum(_bytes_of(part) for part in (tensor._indices(), tensor._values()))
    return tensor.numel() * tensor.element_size()


def _bytes_of_object(value: Any) -> int:
    """Bytes of what is no tensor, array or container; of an object that might hold anything, a whole block's."""
    if isinstance(value, (str, bytes, bytearray, np.generic)):
        return len(value) if not isinstance(value, np.generic) else value.nbytes
    return 0 if isinstance(value, (int, float, complex)) else BLOCK_BYTES
