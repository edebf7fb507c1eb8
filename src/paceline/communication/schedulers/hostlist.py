# SPDX-License-Identifier: Apache-2.0
"""Slurm's lists of hosts: `node[001-003,7],gpu-a[1-2]b` are six names.

::

    list   = item {"," item}
    item   = text {"[" range {"," range} "]" text}     every bracket stands for each of its numbers in turn
    range  = digits ["-" digits]                       as many digits as the first number has, at least
"""

from __future__ import annotations

import re
from itertools import product

from paceline.errors import UnsupportedError

MOST = 65_536
"""Most names in a list."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_PIECES = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_ITEMS = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")


def expand(text: str) -> list[str]:
    """The names of the hosts, in the order of the list.

    Raises:
        UnsupportedError: it is no such list, or one of more than `MOST` names.
    """
    items = _ITEMS.findall(text)
    if ",".join(items) != text or not items:
        raise _wrong(text, "brackets or commas do not match")
    found: list[str] = []
    for item in items:
        parts = [_numbers(inside, text) if not outside else [outside] for inside, outside in _PIECES.findall(item)]
        count = 1
        for part in parts:
            count *= len(part)
        if len(found) + count > MOST:
            raise _wrong(text, f"more than {MOST} hosts")
        found += ["".join(name) for name in product(*parts)]
    return found


def _numbers(inside: str, text: str) -> list[str]:
    """The numbers of one pair of brackets, with their leading zeros."""
    found: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _wrong(text, f"{part!r} is no number and no range")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or int(last) - int(first) >= MOST:
            raise _wrong(text, f"the range {part} is empty or too long")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _wrong(text: str, why: str) -> UnsupportedError:
    shown = text if len(text) < 80 else f"{text[:77]}..."
    return UnsupportedError(f"not a list of hosts such as node[001-003,7],gpu-a[1-2]: {shown!r} ({why})")
