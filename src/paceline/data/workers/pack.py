# SPDX-License-Identifier: Apache-2.0
"""Packs batches into a message (:mod:`paceline.data.workers.message`), in a loader process.

The packer looks into dicts and other mutable mappings, lists, tuples and named tuples. The `DataLoader` itself sends
tensors of more than 512 KiB (which are in shared memory already, so packing would be one more copy), tensors with gaps
or overlaps in memory, sparse, quantised, nested, named and conjugate ones, subclasses, tensors that are not on the CPU,
and objects of any other type. A batch with such an object is sent alone, because its size is unknown.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._utils import ExceptionWrapper

from paceline.data.workers.message import IpcBatch, PackedArray, PackedTuple

ALIGNMENT = 64
BLOCK_BYTES = 1024 * 1024
"""The most bytes of a block."""
LARGE_BYTES = BLOCK_BYTES // 2
"""A larger tensor is sent separately."""
INLINE_BYTES = 2 * BLOCK_BYTES
"""A message of at most this goes through the pipe, which is faster than a shared file."""
SCALARS = frozenset({int, float, complex, bool, type(None)})


class Packer:
    """Packs the batches of one block.

    Attributes:
        nbytes: bytes packed, including tensors that are sent separately.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._data = bytearray()
        self._items: list[Any] = []
        self._slots: dict[int, PackedArray] = {}  # by the id of a tensor or array of the present batch

    def __len__(self) -> int:
        return len(self._items)

    def add(self, batch: Any) -> None:
        """Pack a copy of a batch.

        Raises:
            RuntimeError: a tensor in it is part of an autograd graph; the batch is not packed.
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
        """Add an error in place of its batch."""
        self._items.append(error)

    def ipc_batch(self, made_s: float = 0.0) -> IpcBatch:
        """The message of the packed batches, which took `made_s` seconds to make."""
        data: Any = self._data
        if len(data) > INLINE_BYTES:
            data = torch.frombuffer(data, dtype=torch.uint8).share_memory_()  # type: ignore[no-untyped-call]
        return IpcBatch(self._items, data, self.nbytes, made_s)

    def _strip(self, value: Any) -> Any:
        """The same structure, with its tensors and arrays packed."""
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
            return PackedTuple(kind, [self._strip(part) for part in value])
        if isinstance(value, MutableMapping):
            return self._mapping(value)
        self.nbytes += len(value) if kind in (str, bytes) else _bytes_of_object(value)
        return value

    def _mapping(self, value: MutableMapping[Any, Any]) -> Any:
        """A copy, which keeps the attributes of the mapping."""
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
        begin, end = self._append(raw)
        slot = PackedArray(begin, end, tensor.dtype, tuple(tensor.shape), stride, tensor.requires_grad)
        self._slots[id(tensor)] = slot
        return slot

    def _array(self, array: Any) -> Any:
        if array.dtype.kind not in "biufc" or not array.flags.c_contiguous or not array.flags.writeable:
            self.nbytes += _bytes_of_object(array) if array.dtype.hasobject else array.nbytes
            return array
        if id(array) not in self._slots:
            begin, end = self._append(array.reshape(-1).view(np.uint8))
            self._slots[id(array)] = PackedArray(begin, end, array.dtype, array.shape)
        return self._slots[id(array)]

    def _append(self, raw: Any) -> tuple[int, int]:
        """Append bytes; returns their begin and end."""
        self._data += bytes(-len(self._data) % ALIGNMENT)
        begin = len(self._data)
        self._data += memoryview(raw)
        return begin, len(self._data)


def _sendable(tensor: Tensor) -> Tensor:
    """The tensor; an error here is raised at its batch, while the sending thread would lose it."""
    if tensor.requires_grad and not tensor.is_leaf:
        raise RuntimeError(
            f"a batch holds a tensor of shape {tuple(tensor.shape)} that is part of an autograd graph, which cannot "
            "be sent from a loader process; detach() it in the dataset or in collate_fn"
        )
    return tensor


def _layout(tensor: Tensor) -> tuple[Tensor, tuple[int, ...] | None] | None:
    """(elements in the order of memory, strides if not contiguous), or None if the tensor cannot be packed."""
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
    """Approximate bytes of a tensor of any kind."""
    if tensor.layout is torch.sparse_coo:
        return sum(_bytes_of(part) for part in (tensor._indices(), tensor._values()))
    return tensor.numel() * tensor.element_size()


def _bytes_of_object(value: Any) -> int:
    """Bytes of any other object; `BLOCK_BYTES` if unknown."""
    if isinstance(value, (str, bytes, bytearray, np.generic)):
        return len(value) if not isinstance(value, np.generic) else value.nbytes
    return 0 if isinstance(value, (int, float, complex)) else BLOCK_BYTES
