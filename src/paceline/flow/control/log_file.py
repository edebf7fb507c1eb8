# SPDX-License-Identifier: Apache-2.0
"""The file of the state machine's record: written under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from paceline.core import runtime
from paceline.errors import CheckpointError

FORMAT = "paceline control 2"
WITHOUT_CHECKSUM = "paceline control 1"
"""An earlier format, which is still read."""
ADVICE = "move it away to begin anew; the workers then start from a checkpoint"


def encode(state: dict[str, Any]) -> bytes:
    """The contents of the file of a record."""
    text = _text(state)
    head = _text({"format": FORMAT, "crc32": zlib.crc32(text)})
    return head[:-1] + b"," + text[1:]  # encoded once: it is long with many workers


def write(path: Path, text: bytes) -> None:
    """Replace the record by a result of `encode`; only its owner can read it, since it holds the workers' secrets.

    Raises:
        OSError: it cannot be written; the previous record is kept.
    """
    beside, disk = path.with_name(f"{path.name}.tmp"), runtime.disk()
    disk.write_private(beside, text)
    disk.sync(beside)
    disk.replace(beside, path)
    disk.sync_folder(path.parent)


def read(path: Path) -> dict[str, Any] | None:
    """The last written record; None if there is no file.

    It is on the disk for sure when this returns. The process that renamed it may have been killed before it had synced
    the folder, and the reader will tell workers what is in it.

    Raises:
        CheckpointError: the file is damaged, or of another kind.
    """
    disk = runtime.disk()
    try:
        said = json.loads(disk.read(path))
        disk.sync(path)
        disk.sync_folder(path.parent)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from error
    if not isinstance(said, dict) or said.get("format") not in (FORMAT, WITHOUT_CHECKSUM):
        found = said.get("format") if isinstance(said, dict) else type(said).__name__
        raise CheckpointError(f"{path} is no record of the control plane: it has {found!r}, not {FORMAT!r}; {ADVICE}")
    state = {name: value for name, value in said.items() if name not in ("format", "crc32")}
    if said["format"] == FORMAT and said.get("crc32") != zlib.crc32(_text(state)):
        raise damaged(path, "its checksum does not fit its contents")
    return state


def _text(state: dict[str, Any]) -> bytes:
    return json.dumps(state, separators=(",", ":")).encode()


def damaged(path: Path | None, why: str) -> CheckpointError:
    """The error for an invalid record."""
    return CheckpointError(f"the control plane's record {path} cannot be read: {why}; {ADVICE}")
