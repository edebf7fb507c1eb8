# SPDX-License-Identifier: Apache-2.0
"""Foreign text, such as logs and program output, made harmless for a terminal.

A terminal obeys control characters: they can move its cursor, rename its window, fill the clipboard or hide text. Here
each is replaced by a visible sign, and so are characters that change the direction of writing.
"""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

_BIDIRECTIONAL = "\u200e\u200f\u061c\u2028\u2029\u202a-\u202e\u2066-\u2069"
CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDIRECTIONAL}\ud800-\udfff]")
"""Control characters except the tab and the end of a line."""
_SEQUENCE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_](?:[^\x07\x1b\x9c]|\x1b(?!\\))*(?:\x07|\x1b\\|\x9c)?|\x9b[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")


def visible(text: str) -> str:
    """The text with a sign for each control character; tabs and ends of lines stay."""
    return CONTROL.sub(_sign, text)


def coloured(line: str) -> str:
    """A program's line with its colours, and without other control sequences."""
    parts = _SEQUENCE.sub(lambda match: match[0] if _COLOUR.fullmatch(match[0]) else "", line)
    ends = [0, *(place for match in _COLOUR.finditer(parts) for place in match.span()), len(parts)]
    pieces = [parts[low:high] for low, high in pairwise(ends)]
    return "".join(piece if number % 2 else visible(piece) for number, piece in enumerate(pieces))


def plain(line: str) -> str:
    """A program's line without control sequences."""
    return visible(_SEQUENCE.sub("", line))


def deeply(value: Any) -> Any:
    """A JSON value with `visible` applied to all strings, keys included."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, list):
        return [deeply(one) for one in value]
    if isinstance(value, dict):
        return {visible(name): deeply(one) for name, one in value.items()}
    return value


def _sign(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\\u{code:04x}" if code > 0xFF else f"\\x{code:02x}"
