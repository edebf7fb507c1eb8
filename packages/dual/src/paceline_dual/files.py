# SPDX-License-Identifier: Apache-2.0
"""Atomic writing of files."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file and create its folder; a concurrent reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8", newline="")
    os.replace(new, path)
