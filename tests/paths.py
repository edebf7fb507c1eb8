# SPDX-License-Identifier: Apache-2.0
"""Where processes that tests start find their modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def python_path(*more: Path) -> str:
    """Their PYTHONPATH: the folder that has them start sooner, paceline, and more folders."""
    return os.pathsep.join(map(str, [ROOT / "tests" / "startup", ROOT / "src", *more]))
