# SPDX-License-Identifier: Apache-2.0
"""The names of checkpoint steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

STEP = re.compile(r"step-(\d{9,18})")


Needed = Callable[[dict[str, Any]], Iterable[str]]
"""Manifest -> names of the files to fetch."""


def step_name(number: int) -> str:
    """The name of a step."""
    return f"step-{number:09d}"


def is_step(place: str | Path) -> bool:
    """Whether the name is that of one step."""
    return STEP.fullmatch(str(place).rstrip("/").rpartition("/")[2]) is not None
