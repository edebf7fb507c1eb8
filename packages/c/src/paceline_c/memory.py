# SPDX-License-Identifier: Apache-2.0
"""A tool's array, given by its address, for whoever takes DLPack: nothing is copied.

The structures are those of DLPack 0.8 (https://dmlc.github.io/dlpack/latest/c_api.html).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from paceline import UnsupportedError

HOST, CUDA = 1, 2
"""DLPack's numbers of kinds of devices."""


@dataclass(frozen=True)
class Kind:
    """A dtype: its name, and DLPack's code and bits."""

    name: str
    code: int
    bits: int


KINDS = {1: Kind("float32", 2, 32), 2: Kind("float64", 2, 64), 3: Kind("float16", 2, 16), 4: Kind("bfloat16", 4, 16)}
"""`pl_dtype` of paceline.h -> dtype."""


class _Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("index", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("dimensions", ctypes.c_int32),
        ("type", _Type),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),  # NULL: contiguous
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_LENT: list[Any] = []
"""Structures that were handed out; a tensor may outlive its run, and they are small."""


class Memory:
    """One dimension of numbers in the tool's memory.

    Args:
        name: for messages.
        address: of the first number.
        size: how many numbers.
        kind: a value of `pl_dtype`.
        device: as `device_of` returns it.

    Raises:
        ValueError: it is no such memory.
    """

    def __init__(self, name: str, address: int, size: int, kind: int, device: tuple[int, int]) -> None:
        if kind not in KINDS:
            known = ", ".join(f"PL_{one.name.upper()} ({number})" for number, one in KINDS.items())
            raise ValueError(f"{name} has the dtype {kind}, and there are {known}")
        if size < 0:
            raise ValueError(f"{name} has the size {size}; give the number of its elements")
        if not address and size:
            raise ValueError(f"{name} is a null pointer, for {size} elements; allocate it before pl_attach")
        if address % (KINDS[kind].bits // 8):
            raise ValueError(f"{name} lies at {address:#x}, which is no address of a {KINDS[kind].name}; align it")
        self.name, self._address, self._size, self._kind, self._device = name, address, size, KINDS[kind], device

    @property
    def place(self) -> tuple[str, int, int]:
        """(name, address, bytes)."""
        return self.name, self._address, self._size * self._kind.bits // 8

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        shape = (ctypes.c_int64 * 1)(self._size)
        kind = _Type(self._kind.code, self._kind.bits, 1)
        tensor = _Tensor(self._address or None, _Device(*self._device), 1, kind, shape, None, 0)
        managed = _Managed(tensor, None, None)
        _LENT.append((managed, shape))
        return _capsule(ctypes.addressof(managed), b"dltensor", None)


def device_of(text: str) -> tuple[int, int]:
    """DLPack's kind and index of a device such as "cpu" or "cuda:1".

    Raises:
        ValueError: there is no such name.
        UnsupportedError: this process cannot reach that device.
    """
    name, colon, number = text.partition(":")
    if name == "cpu" and not colon:
        return HOST, 0
    if name != "cuda" or (colon and not number.isdecimal()):
        raise ValueError(f'device is {text!r}; it must be "cpu", "cuda" or "cuda:N"')
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = int(number or 0)
    if index >= count:
        raise UnsupportedError(
            f"device is {text!r}, and the torch of this Python sees {count} CUDA devices (torch {torch.__version__}); "
            'install a torch with CUDA, or copy the arrays to the host and attach them on "cpu"'
        )
    return CUDA, index
