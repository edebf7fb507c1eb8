# SPDX-License-Identifier: Apache-2.0
"""What the launcher of an elastic run writes down, so that another can go on where it was killed.

`LOG/elastic.json` is written to a temporary name and renamed, whenever a worker starts or ends. `LOG/elastic.lock` is
locked while a launcher lives, so that there is never a second one.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from paceline.errors import CheckpointError, UnsupportedError

NAME, LOCK = "elastic.json", "elastic.lock"
CONTROL, EVENTS = "control.json", "control.jsonl"
"""The control plane's record, and what it told."""
VERSION = 1


@dataclass(frozen=True)
class SavedPlan:
    """What a launcher of an elastic run was asked for.

    Attributes:
        command: every worker runs; empty without workers.
        environment: what the workers' has that the launcher's has not.
        folder: the directory where they run.
        workers: of this host.
        control: host and port of the control plane.
        leads: whether this launcher hosts it.
        bounds: fewest and most workers of the run, all hosts together.
        timeout_s: after so long somebody who does not answer is lost.
        grace_s: of stragglers, or None.
        tls: folder of certificates, or None for connections in the clear.
        unix_s: when the run began.
    """

    command: list[str]
    environment: dict[str, str]
    folder: str
    workers: int
    control: tuple[str, int]
    leads: bool
    bounds: tuple[int, int]
    timeout_s: float
    grace_s: float | None
    tls: str | None
    unix_s: float

    @property
    def address(self) -> str:
        """HOST:PORT of the control plane."""
        return address_text(*self.control)


def address_text(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around the colons of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Lock:
    """Held by the one launcher of a log directory, until its process ends.

    Raises:
        UnsupportedError: another launcher holds it.
    """

    def __init__(self, directory: Path) -> None:
        self._file: IO[str] = _plain(directory / LOCK)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            who = self._file.read().strip() or "a process of another host"
            self._file.close()
            raise UnsupportedError(
                f"the launcher of the run in {directory} still runs ({who}): end it first, or leave the run to it"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()

    def release(self) -> None:
        """Let another launcher come."""
        self._file.close()


def _plain(path: Path) -> IO[str]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be locked: {error.strerror}; is it a link?") from error
    return os.fdopen(file, "a+", encoding="utf-8")


def write(directory: Path, plan: SavedPlan, places: list[dict[str, Any]]) -> None:
    """Write the record, whole or not at all."""
    text = json.dumps({"version": VERSION, "plan": asdict(plan), "places": places}, indent=1)
    path = directory / NAME
    new = path.with_suffix(".json.new")
    directory.mkdir(exist_ok=True)
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def read(directory: Path) -> tuple[SavedPlan, list[dict[str, Any]]]:
    """The record of an earlier launcher.

    Raises:
        CheckpointError: there is none, or none that can be read.
    """
    path = directory / NAME
    if not path.is_file():
        raise CheckpointError(
            f"no {NAME} in {directory}: only an elastic run can be taken up again; give the log directory of one"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']!r}, wanted {VERSION}")
        said = dict(record["plan"])
        said |= {"control": tuple(said["control"]), "bounds": tuple(said["bounds"])}
        return SavedPlan(**said), list(record["places"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no record of an elastic run ({type(error).__name__}: {error}): it was damaged, or is of "
            "another version; end the workers that still run, and start the run anew"
        ) from error
