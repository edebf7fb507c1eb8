# SPDX-License-Identifier: Apache-2.0
"""Names of the symbols of both sides, to print translations."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline import CheckpointError
from paceline_dual import files

FORMAT = "paceline dual words 1"
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
Side = tuple[str, ...]


@dataclass(frozen=True)
class Words:
    """Names of symbols or labels.

    Attributes:
        x: of x, by number; None if it has no names.
        y: of y, likewise.
        between: separator of two words; empty for characters.
    """

    x: Side | None = None
    y: Side | None = None
    between: str = " "

    def text(self, side: str, value: Any) -> str:
        """A sample as text.

        Args:
            side: "x" or "y".
            value: symbols of a sequence, or a label.
        """
        names: Side | None = getattr(self, side)
        if not isinstance(value, (list, tuple)):
            return _name(names, value)
        return (self.between if names is not None else " ").join(_name(names, one) for one in value)

    def save(self, path: Path) -> None:
        """Write them to a file, atomically."""
        files.write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, ensure_ascii=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Words:
        """Read what `save` wrote; CheckpointError for anything else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["format"] != FORMAT:
                raise CheckpointError(f"{path} holds no words: its format is {found['format']!r}")
            return cls(_side(found["x"]), _side(found["y"]), str(found["between"]))
        except CheckpointError:
            raise
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"cannot read the words {path}: {error}; write them anew with Words.save") from error


def _side(names: Any) -> Side | None:
    if names is None:
        return None
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise TypeError("a side's words are a list of texts")
    return tuple(names)


def _name(names: Sequence[str] | None, value: Any) -> str:
    if names is None or not isinstance(value, int):
        return str(value)
    return names[value] if 0 <= value < len(names) else UNKNOWN
