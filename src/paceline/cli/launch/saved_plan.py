# SPDX-License-Identifier: Apache-2.0
"""The record of an elastic run's launcher, from which another continues if it is killed.

`LOG/elastic.json` is replaced whenever a worker starts or ends. A launcher locks `LOG/elastic.lock` while it lives, so
that there is never a second one.
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
"""The control plane's record, and its events."""
VERSION = 1


@dataclass(frozen=True)
class SavedPlan:
    """The options of a launcher of an elastic run.

    Attributes:
        command: of every worker; empty without workers.
        environment: variables that the workers get in addition to the launcher's.
        folder: their working directory.
        workers: of this host.
        control: host and port of the control plane.
        leads: whether this launcher hosts it.
        bounds: fewest and most workers of the run, all hosts together.
        timeout_s: a worker that does not answer for so long is lost.
        grace_s: of stragglers, or None.
        tls: folder of certificates, or None for connections in the clear.
        unix_s: start of the run.
        relay: host and port of the relay through which hosts of other sites take part, or None.
        invites: whether this launcher hosts that relay.
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
    relay: tuple[str, int] | None = None
    invites: bool = False

    @property
    def address(self) -> str:
        """HOST:PORT of the control plane."""
        return address_text(*self.control)


def address_text(host: str, port: int) -> str:
    """`HOST:PORT`, with brackets around the colons of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Lock:
    """Held by the one launcher of a directory, until its process ends; `name` is the lock's file.

    Raises:
        UnsupportedError: another launcher holds it.
    """

    def __init__(self, directory: Path, name: str = LOCK) -> None:
        self._file: IO[str] = _open_lock(directory / name)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            who = self._file.read().strip() or "a process of another host"
            self._file.close()
            raise UnsupportedError(
                f"the launcher of the run in {directory} still runs ({who}): end it first"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()}")
        self._file.flush()

    def close(self) -> None:
        """Release it for another launcher."""
        self._file.close()


def _open_lock(path: Path) -> IO[str]:
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise UnsupportedError(f"{path} cannot be locked: {error.strerror}; is it a link?") from error
    return os.fdopen(file, "a+", encoding="utf-8")


def write(directory: Path, plan: SavedPlan, places: list[dict[str, Any]]) -> None:
    """Replace the record atomically."""
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
        CheckpointError: it is missing or damaged.
    """
    path = directory / NAME
    if not path.is_file():
        raise CheckpointError(
            f"no {NAME} in {directory}: only an elastic run can be resumed; give the log directory of one"
        )
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if record["version"] != VERSION:
            raise ValueError(f"version {record['version']!r}, wanted {VERSION}")
        said = dict(record["plan"])
        said |= {"control": tuple(said["control"]), "bounds": tuple(said["bounds"])}
        said["relay"] = None if said.get("relay") is None else tuple(said["relay"])
        return SavedPlan(**said), list(record["places"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is no record of an elastic run ({type(error).__name__}: {error}): it is damaged, or of "
            "another version; end the workers that still run, and start a new run"
        ) from error
