# SPDX-License-Identifier: Apache-2.0
"""How a launcher's run ended, in a file for the process that started it: `{"codes": {"1": -9}, "lost": {}}`."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from paceline.cli.launch.launch import Outcome

VARIABLE = "PACELINE_ENDING"


@dataclass(frozen=True)
class Ending:
    """Exit codes by rank, -n for signal n.

    Attributes:
        codes: of the workers that failed.
        lost: of those that failed where the other ones continued.
    """

    codes: Mapping[int, int] = field(default_factory=dict)
    lost: Mapping[int, int] = field(default_factory=dict)


def take() -> Path | None:
    """Where this launcher is to write it; its workers are not told."""
    name = os.environ.pop(VARIABLE, "")
    return Path(name) if name else None


def write(path: Path | None, outcome: Outcome) -> None:
    """Write it, where that was asked for."""
    if path is not None:
        with contextlib.suppress(OSError):  # a full disk: the exit code is still there
            path.write_text(json.dumps({"codes": outcome.codes, "lost": outcome.lost}), encoding="utf-8")


def read(path: Path) -> Ending:
    """What a launcher wrote; empty where it wrote nothing."""
    try:
        said = json.loads(path.read_text(encoding="utf-8"))
        codes, lost = ({int(rank): int(code) for rank, code in said[name].items()} for name in ("codes", "lost"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Ending()
    return Ending(codes, lost)
