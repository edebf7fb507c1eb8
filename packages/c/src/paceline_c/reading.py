# SPDX-License-Identifier: Apache-2.0
"""Arguments as C gives them: addresses of arrays, and text as bytes or None.

What is wrong raises ValueError, with a sentence for the tool's author.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from paceline_c.memory import Memory

MOST_ARRAYS = 1_000_000


def text(name: str, given: bytes | None) -> str:
    """Text in UTF-8."""
    if given is None:
        raise ValueError(f"{name} is a null pointer, and must be text")
    try:
        return given.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{name} must be text in UTF-8, got {given!r} ({error})") from error


def path(given: bytes | None) -> str:
    """The name of a directory."""
    found = text("path", given)
    if not found:
        raise ValueError("path is empty, and must name a directory")
    try:
        os.fsencode(found)
    except UnicodeEncodeError as error:
        raise ValueError(
            f"path has letters that the locale of this process has no bytes for ({error}); set LC_ALL=C.UTF-8, or "
            "choose another name"
        ) from error
    return found


def value(given: str) -> Any:
    """A number, true, false, none, or the text itself."""
    words = {"true": True, "false": False, "none": None}
    if given.lower() in words:
        return words[given.lower()]
    for kind in (int, float):
        try:
            return kind(given)
        except ValueError:
            continue
    return given


def count(given: int) -> int:
    """How many arrays; what is no number of arrays is an error before anything is read."""
    if not 1 <= given <= MOST_ARRAYS:
        raise ValueError(f"count is {given}; give the number of arrays, from 1 to {MOST_ARRAYS:,}")
    return given


def addresses(name: str, many: int, address: int) -> list[int | None]:
    """`many` pointers, None where NULL."""
    return _values(name, ctypes.c_void_p, many, address)


def shapes(many: int, sizes: int, kinds: int) -> list[tuple[int, int]]:
    """(size, dtype) of each array."""
    found = _values("sizes", ctypes.c_int64, many, sizes), _values("dtypes", ctypes.c_int, many, kinds)
    return list(zip(*found, strict=True))


def memory(what: str, arrays: list[int | None], like: list[tuple[int, int]], device: tuple[int, int]) -> list[Memory]:
    """The arrays at these addresses, with these sizes and dtypes."""
    given = enumerate(zip(arrays, like, strict=True))
    return [Memory(f"{what} {place}", one or 0, *shape, device) for place, (one, shape) in given]


def _values(name: str, kind: Any, many: int, address: int) -> list[Any]:
    if not address:
        raise ValueError(f"{name} is a null pointer, and must have {many} values")
    return list((kind * many).from_address(address))
