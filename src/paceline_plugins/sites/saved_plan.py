# SPDX-License-Identifier: Apache-2.0
"""The record of an elastic run's launcher, from which another continues if it is killed.

`LOG/elastic.json` is replaced whenever a worker starts or ends. A launcher locks `LOG/elastic.lock` while it lives, so
that there is never a second one.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.cli.launch.cluster import address_text
from paceline.errors import CheckpointError
from paceline_plugins.sites.elastic_checks import ELASTIC_FILES

NAME, CONTROL, EVENTS = ELASTIC_FILES
"""This record, the control plane's record, and its events."""
VERSION = 1


@dataclass(frozen=True)
class SavedPlan:
    """The options of a launcher of an elastic run."""

    command: list[str]  # of every worker; empty without workers
    environment: dict[str, str]  # variables that the workers get in addition to the launcher's
    folder: str  # their working directory
    workers: int  # of this host
    control: tuple[str, int]  # host and port of the control plane
    leads: bool  # whether this launcher hosts it
    bounds: tuple[int, int]  # fewest and most workers of the run, all hosts together
    timeout_s: float  # a worker that does not answer for so long is lost
    grace_s: float | None  # of stragglers, or None
    tls: str | None  # folder of certificates, or None for connections in the clear
    unix_s: float  # start of the run
    # host and port of the relay through which hosts of other sites take part, or None
    relay: tuple[str, int] | None = None
    invites: bool = False  # whether this launcher hosts that relay

    @property
    def address(self) -> str:
        """HOST:PORT of the control plane."""
        return address_text(*self.control)


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
