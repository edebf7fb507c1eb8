# SPDX-License-Identifier: Apache-2.0
"""An accelerator made of host memory, so that its code paths run, and its waits are counted, where there is none.

Tensors of the device `lazy`, whose own library is not there, hold host memory here, and torch's operations on them run
on the processor. Everything that asks for a tensor's device takes the way of an accelerator. `WAITS` counts what would
make the host wait for the device: a value that is read, a copy to or from host memory that is not asynchronous, an
operation whose result has a size that depends on values.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "lazy"
READS = ("aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero")
SIZED = ("aten::nonzero", "aten::masked_select", "aten::unique_dim", "aten::_unique2")
COPIES = ("aten::_to_copy", "aten::copy_", "aten::_foreach_copy_")


class DeviceTensor(Tensor):
    """A tensor of the device, in host memory.

    Attributes:
        host: its memory.
    """

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        made: DeviceTensor = Tensor._make_wrapper_subclass(
            cls, host.size(), strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype, device=NAME
        )
        made.host = host
        return made

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def untyped_storage(self) -> Any:
        return self.host.untyped_storage()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"DeviceTensor({self.host})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Waits:
    """Counts what makes the host wait for the device, where `counting` is on."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._on = threading.local()

    @contextmanager
    def counting(self) -> Iterator[list[str]]:
        """The waits of this thread inside the context, each with the line of paceline that caused it."""
        found: list[str] = []
        self._on.found = found
        try:
            yield found
        finally:
            self._on.found = None

    def note(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        found = getattr(self._on, "found", None)
        if found is not None and _waits(func.name(), args, kwargs, out):
            ours = [f for f in traceback.extract_stack() if "/src/paceline/" in f.filename]
            place = f"{ours[-1].filename.partition('/src/')[2]}:{ours[-1].lineno}" if ours else "the program"
            found.append(f"{func.name()} at {place}")


WAITS = Waits()


def _waits(name: str, args: Any, kwargs: Any, out: Any) -> bool:
    name = name.partition(".")[0]
    ours = any(isinstance(x, DeviceTensor) for x in tree_leaves((args, kwargs)))
    if name in READS or name in SIZED:
        return ours
    if name not in COPIES or (kwargs.get("non_blocking") or True in args[2:]):
        return False
    given = [isinstance(x, DeviceTensor) for x in tree_leaves((args, out)) if isinstance(x, Tensor) and x.dim()]
    return True in given and False in given


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, DeviceTensor)]
    host_args, host_kwargs = tree_map(lambda x: x.host if isinstance(x, DeviceTensor) else x, (args, kwargs))
    device = kwargs.get("device")
    if device is not None:
        host_kwargs["device"] = "cpu"
    out = func(*host_args, **host_kwargs)
    ours = torch.device(device).type == NAME if device is not None else bool(given)
    if ours:
        known = {id(x.host): x for x in given}  # an operation in place returns its own tensor
        out = tree_map(lambda x: _placed(x, known) if isinstance(x, Tensor) else x, out)
    WAITS.note(func, args, kwargs, out)
    return out


def _placed(host: Tensor, known: dict[int, DeviceTensor]) -> DeviceTensor:
    found = known.get(id(host))
    return found if found is not None else DeviceTensor(host)


class Device(TorchDispatchMode):
    """In this context tensors of `device="lazy"` are the device's; a thread enters its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})
