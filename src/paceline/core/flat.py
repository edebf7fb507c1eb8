# SPDX-License-Identifier: Apache-2.0
"""Named tensors as flat fragments, one for each kind, dtype and device.

A *fragment* treats tensors as one flat space of `numel` elements, in the order of their names, so that an exchange is a
few large messages and an outer step a few loops. The user's tensors keep their memory: a fragment copies ranges of them
out (:meth:`Fragment.read`) and in (:meth:`Fragment.write`).

- Tied weights appear once, frozen ones never; parameters and buffers are kept apart.
- A DTensor is represented by its local shard.
- Outer state has at least 32 bits: float32 for bfloat16, float16 and float32; float64 stays float64.
- Tensors may move (`model.to`, `flatten_parameters`): their addresses are read before every exchange.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from paceline.core.optimizer_state import Owned
from paceline.errors import UnsupportedError

BLOCK_ELEMENTS_CPU = 262_144
"""Elements that outer arithmetic handles at a time: its operands stay in a cache, and Python's share is small."""
BLOCK_ELEMENTS_DEVICE = 1 << 24
"""The same on an accelerator, where kernel launches cost most."""

RUNNING = ("running_mean", "running_var", "num_batches_tracked")
"""The running statistics of torch's normalisation layers."""

AVERAGED = "averages_buffers"
"""An attribute of a module all of whose buffers are averaged: the user declared so of arrays of other libraries."""

_WIRE_DTYPES = {
    torch.bool: torch.uint8,
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_INTEGER_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def outer_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of outer state for tensors of `dtype`; int64 for integers."""
    if dtype in _INTEGER_DTYPES:
        return torch.int64
    if dtype not in _WIRE_DTYPES:
        raise UnsupportedError(f"tensors of {dtype} cannot be averaged; use a float type of 16 bits or more")
    return _WIRE_DTYPES[dtype]


@dataclass(frozen=True)
class TensorSlot:
    """A tensor's range in its fragment: elements offset .. offset + numel (excl.)."""

    name: str
    shape: tuple[int, ...]
    offset: int
    numel: int

    @property
    def end(self) -> int:
        return self.offset + self.numel


def local(tensor: Tensor) -> Tensor:
    """The tensor's local memory: the shard of a DTensor, else the tensor itself, without its graph."""
    tensor = tensor.detach()
    to_local = getattr(tensor, "to_local", None)
    return to_local() if to_local is not None else tensor


def is_sharded(tensor: Tensor) -> bool:
    """Whether other processes hold parts of it."""
    return hasattr(tensor, "to_local")


def _like(tensor: Any, memory: Tensor) -> Tensor:
    """`memory` as the local memory of a tensor such as `tensor`."""
    if not is_sharded(tensor):
        return memory
    return type(tensor.data).from_local(  # type: ignore[no-any-return]
        memory, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def flat_view(name: str, tensor: Tensor) -> Tensor:
    """The tensor's memory as one row, shape (numel,), without a copy; complex numbers as pairs."""
    tensor = local(tensor)
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.is_contiguous():
        return tensor.view(-1)
    if torch.ops.aten.is_non_overlapping_and_dense(tensor):  # channels_last and other permutations
        return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    raise UnsupportedError(
        f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}, which leave holes in memory; "
        "make it contiguous before attaching"
    )


class Fragment:
    """Tensors of one kind, dtype and device, end to end in one flat space.

    Args:
        key: its name, for example `parameters/float32/cpu`.
        named: (name, tensor) pairs of one dtype and device.
        find: names -> the present tensors of these names, for tensors that may be replaced (reassigned buffers, a
            loaded optimizer state); None for tensors that stay.
        from_rank_0: whether workers that exchange take rank 0's, in place of the mean.
    """

    def __init__(
        self,
        key: str,
        named: list[tuple[str, Tensor]],
        find: Callable[[list[str]], list[Tensor]] | None = None,
        from_rank_0: bool = False,
    ) -> None:
        self.key, self.from_rank_0 = key, from_rank_0
        self._find = find
        self.names = [name for name, _ in named]
        self.tensors = [tensor for _, tensor in named]
        first = local(self.tensors[0])
        self.dtype = _WIRE_DTYPES[first.dtype] if first.dtype.is_complex else first.dtype
        self.outer_dtype = outer_dtype(first.dtype)
        self.device = first.device
        self.block_elements = BLOCK_ELEMENTS_CPU if self.device.type == "cpu" else BLOCK_ELEMENTS_DEVICE
        self.slots: list[TensorSlot] = []
        self.numel = 0
        self._look()

    def _look(self) -> None:
        """Take the tensors' present addresses, and drop the cached cuts."""
        self._views = [flat_view(n, t) for n, t in zip(self.names, self.tensors, strict=True)]
        self._addresses = [view.data_ptr() for view in self._views]
        self._cuts: dict[tuple[int, int], tuple[list[Tensor], list[tuple[int, int]]]] = {}
        slots, offset = [], 0
        for name, tensor, view in zip(self.names, self.tensors, self._views, strict=True):
            slots.append(TensorSlot(name, tuple(local(tensor).shape), offset, view.numel()))
            offset += view.numel()
        if self.slots and slots != self.slots:
            raise UnsupportedError(_changed(self.slots, slots))
        self.slots, self.numel = slots, offset

    def refresh(self) -> None:
        """Follow tensors whose memory has moved since the last exchange."""
        if self._find is not None:
            self.tensors = self._find(self.names)
        now = [local(tensor).data_ptr() for tensor in self.tensors]
        if now == self._addresses:
            return
        self._look()
        if self._views[0].device != self.device:
            raise UnsupportedError(
                f"{self.names[0]} has moved from {self.device} to {self._views[0].device} since attach; "
                "move the model first, then attach"
            )

    def zeros(self, device: torch.device | None = None) -> Tensor:
        """Outer state: zeros of shape (numel,), pinned if the model is on CUDA and the state on the host."""
        device = device or self.device
        pin = device.type == "cpu" and self.device.type == "cuda"
        return torch.zeros(self.numel, dtype=self.outer_dtype, device=device, pin_memory=pin)

    def blocks(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Cut [begin, end) at multiples of the block size."""
        size = self.block_elements
        while begin < end:
            stop = min(end, (begin // size + 1) * size)
            yield begin, stop
            begin = stop

    def cut(self, begin: int, end: int) -> tuple[list[Tensor], list[tuple[int, int]]]:
        """The pieces of the tensors in [begin, end), and the range of each relative to begin."""
        cut = self._cuts.get((begin, end))
        if cut is None:
            pieces, places = [], []
            for slot, view in zip(self.slots, self._views, strict=True):
                low, high = max(begin, slot.offset), min(end, slot.end)
                if low < high:
                    pieces.append(view[low - slot.offset : high - slot.offset])
                    places.append((low - begin, high - begin))
            cut = self._cuts[begin, end] = (pieces, places)
        return cut

    def read(self, begin: int, end: int, out: Tensor) -> Tensor:
        """Copy elements [begin, end) of the tensors into `out`, shape (end - begin,), casting as needed.

        If one tensor of the outer dtype covers the range, its memory is returned without a copy; the result is
        read-only.
        """
        piece = self.piece(begin, end, out)
        if piece is not out:
            return piece
        pieces, places = self.cut(begin, end)
        with torch.no_grad():
            torch._foreach_copy_([out[low:high] for low, high in places], pieces)
        return out

    def piece(self, begin: int, end: int, other: Tensor) -> Tensor:
        """The memory of [begin, end), if one tensor of `other`'s dtype and device covers it; else `other`."""
        pieces, _ = self.cut(begin, end)
        if len(pieces) == 1 and pieces[0].dtype == other.dtype and pieces[0].device == other.device:
            return pieces[0]
        return other

    def write(self, begin: int, end: int, values: Tensor) -> None:
        """Copy `values`, shape (end - begin,), into elements [begin, end) of the tensors, casting as needed."""
        pieces, places = self.cut(begin, end)
        with torch.no_grad():
            torch._foreach_copy_(pieces, [values[low:high] for low, high in places])

    def whole(self, device: torch.device | None = None, out: Tensor | None = None) -> Tensor:
        """A flat copy of the tensors, shape (numel,), in the outer dtype; in `out`, if given."""
        out = self.zeros(device) if out is None else out
        for begin, end in self.blocks(0, self.numel):
            block = out[begin:end]
            values = self.read(begin, end, block)
            if values is not block:
                block.copy_(values)
        return out

    @property
    def sums(self) -> list[Tensor]:
        """The sum of each tensor, which is finite if its elements are, unless it overflows; none of whole numbers."""
        return [view.sum(dtype=self.outer_dtype) for view in self._views] if self.outer_dtype.is_floating_point else []

    def finite(self) -> bool:
        """Whether every element is finite."""
        return all_finite([self])

    def reset_nonfinite(self, before: Tensor) -> None:
        """Take the values `before`, shape (numel,), if any is inf or nan now; only those that have become so where all
        take rank 0's, which may be infinite by intent."""
        if not self.finite():
            self.write(0, self.numel, self.without_nonfinite(self.whole(before.device), before).to(self.device))

    def without_nonfinite(self, now: Tensor, before: Tensor) -> Tensor:
        """What `reset_nonfinite` takes, which asks nothing of the host."""
        finite = now.isfinite()
        return torch.where(finite | ~before.isfinite() if self.from_rank_0 else finite.all(), now, before)

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Name -> a copy of its part of `flat`, with the tensor's own shape, strides and dtype, sharded as it is."""
        result = {}
        for slot, tensor in zip(self.slots, self.tensors, strict=True):
            copy = torch.empty_like(local(tensor))
            flat_view(slot.name, copy).copy_(flat[slot.offset : slot.end])
            result[slot.name] = _like(tensor, copy)
        return result

    def layout(self) -> list[list[object]]:
        """The layout that every worker must share; serializable as JSON."""
        kind = self.key.split("/")[0]
        return [
            [slot.name, list(slot.shape), str(tensor.dtype).removeprefix("torch."), kind]
            for slot, tensor in zip(self.slots, self.tensors, strict=True)
        ]


def _changed(before: list[TensorSlot], now: list[TensorSlot]) -> str:
    old, new = next((old, new) for old, new in zip(before, now, strict=True) if old != new)
    return (
        f"{new.name} had shape {old.shape} at attach and has {new.shape} now; "
        "the model must keep its shape while it is attached"
    )


@torch.no_grad()
def all_finite(parts: Iterable[Fragment]) -> bool:
    """Whether every element of these fragments is finite: sums find inf and nan at the speed of memory.

    Values of one device and dtype are read together, so that an accelerator is waited for once.
    """
    sums: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    parts = list(parts)
    for part in parts:
        sums.setdefault((part.device, part.outer_dtype), []).extend(part.sums)
    if all(bool(torch.isfinite(torch.stack(squares)).all()) for squares in sums.values() if squares):
        return True
    return all(bool(torch.isfinite(view).all()) for part in parts if part.sums for view in part._views)  # or overflow


def fragments(
    kind: str,
    named: Iterable[tuple[str, Tensor]],
    find: Callable[[list[str]], list[Tensor]] | None = None,
    from_rank_0: bool = False,
) -> list[Fragment]:
    """Group (name, tensor) pairs into fragments, one for each dtype and device, in the order of first appearance.

    Tensors without elements (in this worker's shard) do not count.
    """
    groups: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if not local(tensor).numel():
            continue
        dtype = str(tensor.dtype).removeprefix("torch.")
        groups.setdefault(f"{kind}/{dtype}/{tensor.device}", []).append((name, tensor))
    return [Fragment(key, group, find, from_rank_0) for key, group in groups.items()]


Modules = nn.Module | list[nn.Module] | tuple[nn.Module, ...] | dict[str, nn.Module]


def module_list(model: Modules) -> list[tuple[str, nn.Module]]:
    """(prefix, module) pairs of one module, a sequence of them, or a dictionary."""
    if isinstance(model, nn.Module):
        return [("", model)]
    if isinstance(model, dict):
        return [(f"{name}.", module) for name, module in model.items()]
    return [(f"{number}.", module) for number, module in enumerate(model)]


def _plain(name: str) -> str:
    """The user's name, without the parts that torch.compile and checkpoint wrappers insert."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def trainable(model: Modules) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require a gradient, tied ones once, in the model's order."""
    seen: set[int] = set()
    named = []
    for prefix, module in module_list(model):
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                named.append((prefix + _plain(name), parameter))
    return named


def find_buffers(model: Modules) -> Callable[[list[str]], list[Tensor]]:
    """A function: names -> the buffers that have these names now."""

    def find(names: list[str]) -> list[Tensor]:
        now = {
            prefix + _plain(own): buffer
            for prefix, module in module_list(model)
            for own, buffer in module.named_buffers()
        }
        for name in names:
            if name not in now:
                raise UnsupportedError(f"the buffer {name} was there at attach and is gone; keep it while attached")
        return [now[name] for name in names]

    return find


def averaged_buffers(model: Modules) -> list[tuple[str, Tensor]]:
    """The running statistics of torch's normalisation layers (BatchNorm, SyncBatchNorm, InstanceNorm, subclasses).

    Of other buffers nobody knows whether their mean means anything.
    """
    return [(name, buffer) for name, buffer, averaged in exchanged_buffers(model) if averaged]


def other_buffers(model: Modules) -> list[tuple[str, Tensor]]:
    """All other buffers, of which every worker takes rank 0's: masks, queues, pointers, averages of the user's own."""
    return [(name, buffer) for name, buffer, averaged in exchanged_buffers(model) if not averaged]


def exchanged_buffers(model: Modules) -> Iterator[tuple[str, Tensor, bool]]:
    """Name, buffer and whether it is averaged; each once."""
    seen: set[int] = set()
    for prefix, top in module_list(model):
        for path, module in top.named_modules():
            for key, buffer in module._buffers.items():
                if buffer is None or id(buffer) in seen or not _is_flat(buffer):
                    continue
                seen.add(id(buffer))
                known = key in RUNNING if isinstance(module, _NormBase) else hasattr(module, AVERAGED)
                averaged = known and bool(torch.isfinite(buffer).all())
                yield prefix + _plain(f"{path}.{key}" if path else key), buffer, averaged


def _is_flat(buffer: Tensor) -> bool:
    """Whether it has elements, and lies in memory as one row."""
    strided = buffer.layout == torch.strided and not is_traceable_wrapper_subclass(buffer)
    return strided and buffer.numel() > 0 and bool(torch.ops.aten.is_non_overlapping_and_dense(local(buffer)))


def buffer_fragments(model: Modules) -> list[Fragment]:
    """Fragments of the buffers that are averaged, and then of the others."""
    find, rows = find_buffers(model), list(exchanged_buffers(model))
    averaged = fragments("buffers", [(name, buffer) for name, buffer, mean in rows if mean], find)
    return averaged + fragments("buffers", [(name, buffer) for name, buffer, mean in rows if not mean], find, True)


def exchanged_parts(model: Modules, owned: Owned) -> list[Fragment]:
    """The tensors that workers exchange: trained parameters and buffers."""
    return fragments("parameters", [pair for _, named in owned for pair in named]) + buffer_fragments(model)


def buffer_elements(model: Modules) -> int:
    """Elements of all buffers that workers exchange."""
    return sum(buffer.numel() for _, buffer, _ in exchanged_buffers(model))


# Parameters that several processes hold as shards (DTensors), as `fully_shard` of torch makes them: these processes are
# one worker. An inf, or the norm of a contribution, each of them sees in its own shard only, so they tell each other
# before the worker says anything about itself: else some would apply what others reject.


class Shards:
    """The processes that hold the parameters of this worker; without any, a worker is one process.

    Args:
        parameters: of the worker.

    Raises:
        UnsupportedError: its shards lie in several groups of processes, or in a mesh of several dimensions.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        sharded: list[Any] = [one for one in parameters if is_sharded(one)]
        meshes = {one.device_mesh for one in sharded}
        self._mesh: Any = next(iter(meshes), None)
        self.any = self._mesh is not None
        self._device = local(sharded[0]).device if sharded else None
        if len(meshes) > 1 or any(mesh.ndim > 1 for mesh in meshes):
            raise UnsupportedError(
                "the parameters of one worker are sharded over several meshes, or over one of several dimensions; "
                "shard all of them over one mesh of one dimension, such as fully_shard(model, mesh=mesh['shard'])"
            )

    @property
    def place(self) -> tuple[int, int]:
        """Which shard this process holds, and of how many."""
        return (self._mesh.get_local_rank(), self._mesh.size()) if self.any else (0, 1)

    def all(self, yes: bool) -> bool:
        """Whether all processes of the worker say so."""
        return yes if not self.any else not self._sums(not yes)[0]

    def together(self, norm: float, mean_norm: float, finite: bool) -> tuple[float, float, bool]:
        """Two norms of the whole worker, and whether all of it is finite, from those of this process."""
        if not self.any:
            return norm, mean_norm, finite
        squares = self._sums(norm**2, mean_norm**2, not finite)
        return math.sqrt(squares[0]), math.sqrt(squares[1]), not squares[2]

    def _sums(self, *numbers: float) -> list[float]:
        row = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        torch.distributed.all_reduce(row, group=self._mesh.get_group())
        return list(row.tolist())


def reshard(model: Modules) -> None:
    """Drop what forward passes have gathered of the shards; it would be read in place of changed ones."""
    kind: Any = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    for _, root in module_list(model) if kind else ():
        for module in root.modules():
            if isinstance(module, kind):
                module.reshard()
