# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries as tensors in the same memory, without a copy."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from paceline.core.flat import outer_dtype
from paceline.errors import UnsupportedError

IMMUTABLE = {
    "jax": "attach it through paceline_plugins.frameworks.jax",
    "jaxlib": "attach it through paceline_plugins.frameworks.jax",
    "tensorflow": "attach tf.Variables, and nothing else beside them",
}
"""Libraries with DLPack whose arrays are immutable, and the alternative."""

Arrays = Mapping[str, Any] | Sequence[Any]


def named(arrays: Arrays) -> dict[str, Any]:
    """Name -> array; arrays of a sequence are numbered, and variables of Keras stand for those of its back end."""
    pairs: Iterable[tuple[str, Any]]
    if isinstance(arrays, Mapping):
        pairs = ((str(name), array) for name, array in arrays.items())
    elif isinstance(arrays, (list, tuple)):
        pairs = ((str(number), array) for number, array in enumerate(arrays))
    else:
        raise UnsupportedError(
            f"arrays must be a list or a dictionary of arrays, got {type(arrays).__name__}; put a single one in a list"
        )
    result: dict[str, Any] = {}
    for name, array in pairs:
        plain = name.replace(".", "/")  # torch keeps the dot for modules inside modules
        if not plain or plain in result:
            raise UnsupportedError(f"{name!r} is empty or names two arrays; give each array its own name")
        result[plain] = array.value if library(array) == "keras" and hasattr(array, "value") else array
    if not result:
        raise UnsupportedError("there is no array to attach")
    return result


def library(array: Any) -> str:
    """The package that the array's type comes from."""
    return type(array).__module__.partition(".")[0]


def view(name: str, array: Any) -> Tensor:
    """The array as a tensor of the same shape in the same memory.

    Raises:
        UnsupportedError: it has no floating-point numbers, is immutable, has gaps in memory, or its library shares no
            memory.
    """
    tensor = _shared(name, array)
    check_trainable(name, tensor)
    if not torch.ops.aten.is_non_overlapping_and_dense(tensor):
        raise UnsupportedError(
            f"{name} of shape {tuple(tensor.shape)} has gaps or overlaps in memory (strides "
            f"{tensor.stride()}); attach a contiguous copy and train that, e.g. array.copy()"
        )
    return tensor


def check_trainable(name: str, tensor: Tensor) -> None:
    """Refuse numbers that are not floating-point or complex."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise UnsupportedError(
            f"{name} holds {_plain(tensor)}, and only floating-point numbers can be trained; leave it out, or "
            "convert it, e.g. array.astype('float32')"
        )
    outer_dtype(tensor.dtype)


def check_apart(tensors: Mapping[str, Tensor]) -> None:
    """Refuse arrays that share memory: they would be changed twice."""
    places = sorted(
        (str(t.device), t.data_ptr(), t.data_ptr() + t.numel() * t.element_size(), name)
        for name, t in tensors.items()
        if t.numel()
    )
    for one, other in itertools.pairwise(places):
        if one[0] == other[0] and other[1] < one[2]:
            raise UnsupportedError(f"{one[3]} and {other[3]} lie in the same memory; attach one of them")


def _plain(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shared(name: str, array: Any) -> Tensor:
    if library(array) in IMMUTABLE:
        raise UnsupportedError(
            f"{name} is an array of {library(array)}, which is immutable; {IMMUTABLE[library(array)]}"
        )
    if isinstance(array, Tensor):
        return array.detach()
    if isinstance(array, np.ndarray):
        return _of_numpy(name, array)
    if hasattr(array, "__dlpack__"):
        if _exports_read_only(array):
            raise UnsupportedError(_read_only(name))
        return _by(from_dlpack, name, array)
    if hasattr(array, "__cuda_array_interface__"):
        if array.__cuda_array_interface__["data"][1]:
            raise UnsupportedError(_read_only(name))
        return _by(torch.as_tensor, name, array)
    if hasattr(array, "__array_interface__"):
        return _of_numpy(name, np.asarray(array))
    try:
        memory = memoryview(array)
    except TypeError:
        raise UnsupportedError(
            f"{name} is a {type(array).__name__}, which has neither DLPack nor the buffer protocol; {_instead(array)}"
        ) from None
    return _of_numpy(name, np.asarray(memory))


def _by(share: Callable[[Any], Tensor], name: str, array: Any) -> Tensor:
    try:
        return share(array)
    except (BufferError, RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise UnsupportedError(f"{name} ({type(array).__name__}) cannot be shared with torch: {error}") from error


def _exports_read_only(array: Any) -> bool:
    """Whether the library says so by DLPack 1.0, of which torch does not ask that.

    The struct DLManagedTensorVersioned begins with two numbers of 32 bits and two pointers; then come 64 flags, the
    first of which is DLPACK_FLAG_BITMASK_READ_ONLY (dlpack.h).
    """
    try:
        capsule = array.__dlpack__(max_version=(1, 0))
    except (BufferError, RuntimeError, TypeError, ValueError):
        return False  # it knows earlier versions only, or `from_dlpack` will say what is wrong
    python = ctypes.pythonapi
    python.PyCapsule_IsValid.argtypes = python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_GetPointer.restype = ctypes.c_void_p
    if not python.PyCapsule_IsValid(capsule, b"dltensor_versioned"):
        return False
    flags = python.PyCapsule_GetPointer(capsule, b"dltensor_versioned") + 2 * 4 + 2 * ctypes.sizeof(ctypes.c_void_p)
    return bool(ctypes.c_uint64.from_address(flags).value & 1)


def _instead(array: Any) -> str:
    """What to attach: the array inside of a blob of Caffe, a parameter of Chainer and their like, if it is one."""
    for attribute in ("array", "data"):
        inside = getattr(array, attribute, None)
        if hasattr(inside, "shape") and hasattr(inside, "dtype"):
            return f"attach the {type(inside).__name__} inside of it, .{attribute}"
    return "attach arrays, e.g. of NumPy"


def _read_only(name: str) -> str:
    return f"{name} is read-only, and training writes to it; attach a copy and train that: array.copy()"


def _of_numpy(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    if not array.flags.writeable:
        raise UnsupportedError(_read_only(name))
    if array.dtype.name == "bfloat16":  # of ml_dtypes, which torch does not accept
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(
            f"{name} of {array.dtype} and shape {array.shape} cannot be shared with torch ({error}); "
            "use float64, float32 or float16, in an array of its own"
        ) from error
