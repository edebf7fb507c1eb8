# SPDX-License-Identifier: Apache-2.0
"""Parcels: several batches in one message from a loader process.

A tensor that a process sends costs a message, a file of shared memory and a descriptor of its own, whatever its size.
So the process pickles each batch with the bytes of its tensors and arrays set apart (pickle's protocol 5), lays those
bytes end to end, each at a multiple of 64, and sends all batches of a block as one parcel. The training process takes
views.

What comes out is what a bare `DataLoader` would give, but for this:

- The memory of a block, about 1 MiB, lives as long as one tensor of one of its batches. No two tensors overlap:
  writing into one batch changes no other.
- Tensors of a batch that shared memory with each other (a tensor and a slice of it) come out as separate tensors; the
  same tensor twice comes out as the same tensor twice.

Left to PyTorch's own way between processes: tensors of more than 512 KiB (they lie in shared memory already, so
packing would be one more copy), tensors with gaps or overlaps in memory, sparse, quantised, nested, named and conjugate
tensors, subclasses, and what is not on the CPU. Both ends are processes of the user's own program.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

ALIGNMENT = 64
LARGE_BYTES = 512 * 1024
"""A tensor of more than this travels by itself."""
INLINE_BYTES = 2 * 1024 * 1024
"""A parcel of at most this goes through the pipe, which is quicker than to make, send and map a file."""

Span = tuple[int, int, bool] | int
"""Begin, end and whether a tensor (else an array) lies there; or the index of a tensor that travels by itself."""


class Packer:
    """Gathers the batches of one block.

    Attributes:
        nbytes: bytes gathered, those of tensors that travel by themselves included.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._data = bytearray()
        self._items: list[Any] = []
        self._spans: list[list[Span]] = []
        self._outside: list[list[Tensor]] = []

    def __len__(self) -> int:
        return len(self._items)

    def add(self, batch: Any) -> None:
        """Take a copy of a batch.

        Raises:
            Exception: whatever pickling it raises; the parcel is as it was before.
        """
        mark, stream = len(self._data), io.BytesIO()
        pickler = _Pickler(stream, self._data)
        try:
            pickler.dump(batch)
        except BaseException:
            del self._data[mark:]
            raise
        self._put(stream.getvalue(), pickler.spans, pickler.outside)
        self.nbytes += stream.tell() + len(self._data) - mark + sum(_bytes_of(tensor) for tensor in pickler.outside)

    def add_error(self, error: ExceptionWrapper) -> None:
        """In the place of a batch that could not be made."""
        self._put(error, [], [])

    def _put(self, item: Any, spans: list[Span], outside: list[Tensor]) -> None:
        self._items.append(item)
        self._spans.append(spans)
        self._outside.append(outside)

    def parcel(self, left: int = 0) -> Parcel:
        """What was gathered, ready to be sent; `left` batches of the block were not made."""
        data: Any = self._data
        if len(data) > INLINE_BYTES:
            data = torch.frombuffer(data, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        return Parcel(self._items, self._spans, self._outside, data, self.nbytes, left)


@dataclass
class Parcel:
    """Several batches in one message.

    Attributes:
        items: for each batch its pickle without the bytes of its tensors, or the error in its place; once pinned the
            batch itself.
        spans: for each batch where those bytes lie in `data`, in the order in which the pickle asks for them.
        outside: for each batch its tensors that travel by themselves.
        data: all bytes, end to end.
        nbytes: as :class:`Packer` says.
        left: batches of the block, the last ones, that were not made.
        pinned: `data` is in page-locked memory and the batches are unpacked.
    """

    items: list[Any]
    spans: list[list[Span]]
    outside: list[list[Tensor]]
    data: Any
    nbytes: int
    left: int
    pinned: bool = False

    def __len__(self) -> int:
        return len(self.items)

    def batch(self, index: int) -> Any:
        """The `index`-th batch.

        Raises:
            Exception: the error that making or pinning this batch met, as the bare `DataLoader` raises it.
        """
        item = self.items[index]
        if isinstance(item, ExceptionWrapper):
            _reraise(item)
        return item if self.pinned else self._unpack(index)

    def pin_memory(self) -> Parcel:
        """The same with the batches unpacked in page-locked memory; `DataLoader`'s thread for that calls it."""
        pinned = replace(self, data=self._tensor().pin_memory(), pinned=True)
        return replace(pinned, items=[pinned._pinned_item(index) for index in range(len(self))])

    def _pinned_item(self, index: int) -> Any:
        from torch.utils.data._utils.pin_memory import pin_memory

        item = self.items[index]
        if isinstance(item, ExceptionWrapper):
            return item
        try:
            return pin_memory(self._unpack(index))  # type: ignore[no-untyped-call]  # what is pinned stays as it is
        except Exception:
            return ExceptionWrapper(where="in pin memory thread")  # type: ignore[no-untyped-call]

    def _tensor(self) -> Tensor:
        """All bytes, in memory that may be written; (n,) uint8."""
        if not isinstance(self.data, Tensor):
            arrived = np.frombuffer(self.data, dtype=np.uint8)
            self.data = torch.empty(len(arrived), dtype=torch.uint8)  # aligned, which what came from a pipe is not
            self.data.numpy()[:] = arrived
        return self.data

    def _unpack(self, index: int) -> Any:
        data, outside = self._tensor(), self.outside[index]
        view = memoryview(data.numpy())  # type: ignore[arg-type,unused-ignore]
        whole = data if self.pinned else None
        buffers = [outside[s] if isinstance(s, int) else _buffer(view, whole, s) for s in self.spans[index]]
        return pickle.loads(self.items[index], buffers=buffers)


def _reraise(wrapped: ExceptionWrapper) -> None:
    try:
        wrapped.reraise()  # type: ignore[no-untyped-call]
    except BaseException as error:
        # The frame that raised it holds the error: that circle would keep all callers, and with them the loader
        # processes, until the garbage collector comes.
        raise error.with_traceback(None)  # noqa: B904


def _buffer(view: memoryview, pinned: Tensor | None, span: tuple[int, int, bool]) -> Any:
    """What lies at `span`: a piece of memory, or, for a tensor in page-locked memory, a view.

    PyTorch must know a page-locked tensor's storage, or it would reuse the memory before a copy to a device has ended.
    Other tensors get a storage of their own, so that saving or resizing one does not touch its neighbours.
    """
    begin, end, is_tensor = span
    if is_tensor and pinned is not None:
        return pinned[begin:end].data  # `.data`: with a version counter of its own
    return view[begin:end]


class _Pickler(ForkingPickler):
    """Sets the bytes of tensors and arrays apart; the rest is done as between any two processes of PyTorch."""

    def __init__(self, stream: io.BytesIO, data: bytearray) -> None:
        super().__init__(stream, 5, True, self._set_apart)
        self.spans: list[Span] = []
        self.outside: list[Tensor] = []
        self._data, self._is_tensor, self._is_outside = data, False, False

    def reducer_override(self, obj: Any) -> Any:
        """How to pickle `obj`; called for whatever pickle has no way of its own for."""
        if not isinstance(obj, Tensor):
            return NotImplemented
        layout = _layout(obj)
        if layout is None:
            self.outside.append(_sendable(obj))
            self._is_outside = True
            return _the_same, (pickle.PickleBuffer(bytearray(1)),)  # stands for what the other side will put in
        flat, stride = layout
        buffer = None
        if flat.numel():
            self._is_tensor = True
            buffer = pickle.PickleBuffer(flat.view(torch.uint8).numpy())  # type: ignore[arg-type,unused-ignore]
        return _rebuild, (buffer, obj.dtype, tuple(obj.shape), stride, obj.requires_grad)

    def _set_apart(self, buffer: pickle.PickleBuffer) -> bool:
        """Pickle asks of every run of bytes whether it shall be in the pickle."""
        is_tensor, is_outside = self._is_tensor, self._is_outside
        self._is_tensor = self._is_outside = False
        if is_outside:
            self.spans.append(len(self.outside) - 1)
            return False
        raw = buffer.raw()
        self._data += bytes(-len(self._data) % ALIGNMENT)
        begin = len(self._data)
        self._data += raw
        self.spans.append((begin, begin + raw.nbytes, is_tensor))
        return False


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor; an error here surfaces at its batch, later it would be lost in the thread that sends."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            f"a batch holds a tensor of shape {tuple(tensor.shape)} that is part of a graph of gradients, which cannot "
            "be sent from a loader process; detach() it in the dataset or in collate_fn"
        )
    return tensor


def _the_same(tensor: Tensor) -> Tensor:
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


def _rebuild(
    buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...] | None, requires_grad: bool
) -> Tensor:
    """A tensor in the memory of a parcel."""
    if buffer is None:
        found = torch.empty(shape, dtype=dtype)
    else:
        flat = buffer.view(dtype) if isinstance(buffer, Tensor) else torch.frombuffer(buffer, dtype=dtype)
        found = flat.view(shape) if stride is None else flat.as_strided(shape, stride)
    return found.requires_grad_() if requires_grad else found
