# SPDX-License-Identifier: Apache-2.0
"""The file of the state machine's record: written under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from paceline.errors import CheckpointError

FORMAT = "paceline control 1"
ADVICE = "move it away to begin anew; the workers then start from a checkpoint"


def write(path: Path, state: dict[str, Any]) -> None:
    """Replace the record; only its owner can read it, since it holds the workers' secrets.

    Raises:
        OSError: it cannot be written; the previous record is kept.
    """
    text = json.dumps({"format": FORMAT, **state}, separators=(",", ":")).encode()
    beside = path.with_name(f"{path.name}.tmp")
    file = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(file, "wb", closefd=False) as out:
            out.write(text)
        os.fsync(file)
    finally:
        os.close(file)
    os.replace(beside, path)


def read(path: Path) -> dict[str, Any] | None:
    """The last written record; None if there is no file.

    Raises:
        CheckpointError: the file is damaged, or of another kind.
    """
    try:
        said = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(said, dict) or said.get("format") != FORMAT:
        found = said.get("format") if isinstance(said, dict) else type(said).__name__
        raise CheckpointError(f"{path} is no record of the control plane: it has {found!r}, not {FORMAT!r}; {ADVICE}")
    return said


def damaged(path: Path | None, why: str) -> CheckpointError:
    """The error for an invalid record."""
    return CheckpointError(f"the control plane's record {path} cannot be read: {why}; {ADVICE}")
