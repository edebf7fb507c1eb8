# SPDX-License-Identifier: Apache-2.0
"""Bytes as people write them: 64MiB, 200GB, 1Gbit."""

from __future__ import annotations

import math
import re

from paceline.errors import DataError

_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
_BINARY = {name: 1024**power for power, name in enumerate(_DECIMAL)}
_NUMBER = r"\s*([0-9]+(?:\.[0-9]+)?)\s*"


def parse_bytes(text: str, name: str) -> int:
    """`64MiB` is 67108864 and `200GB` is 200000000000; without a unit, bytes. An error names the option `name`."""
    match = re.fullmatch(_NUMBER + r"([kmgtp]?)(i?)b?\s*", text, re.IGNORECASE)
    if match and not (match[3] and not match[2]):
        found = round(float(match[1]) * (_BINARY if match[3] else _DECIMAL)[match[2].upper()])
        if found > 0:
            return found
    raise DataError(f"{name} must be a size such as 64MiB or 200GB, got {text!r}")


def parse_rate(text: str, name: str) -> float:
    """Bytes a second of `1Gbit`, `200Mbps` (divided by 8) or `100MB`, `100MiB`. An error names the option `name`."""
    cut = re.sub(r"/s\s*$", "", text.strip())
    match = re.fullmatch(_NUMBER + r"([kmgt]?)(bits?|bps)", cut, re.IGNORECASE)
    if match and float(match[1]) > 0:
        return float(match[1]) * _DECIMAL[match[2].upper()] / 8
    if not match and cut.endswith("B"):  # Gb is ambiguous: refused
        return float(parse_bytes(cut, name))
    raise DataError(f"{name} must be a rate such as 1Gbit or 100MB, got {text!r}")


def bytes_text(count: float) -> str:
    """Three digits and a decimal unit: 1.50 MB."""
    if not math.isfinite(count):
        return "n/a"
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(count) < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.0f} PB"
