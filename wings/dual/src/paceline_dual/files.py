# SPDX-License-Identifier: Apache-2.0
"""Files that appear in one piece."""

from __future__ import annotations

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write a file of UTF-8, and its folder; whoever reads it meanwhile sees the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    new.write_text(text, encoding="utf-8", newline="")
    os.replace(new, path)
