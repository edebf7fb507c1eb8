# SPDX-License-Identifier: Apache-2.0
"""The hosts that `--hosts` names: a list, a file, Slurm's allocation, or the tables of `paceline.toml`.

::

    --hosts a,b,c                   names as ssh knows them; gpu[01-04] are four
    --hosts me@a,b:2222             with a user or a port
    --hosts @FILE, --hosts ./FILE   lines such as `a` or `a slots=4`, as mpirun and DeepSpeed read them
    --hosts slurm                   the nodes of the allocation that this shell is in
    --hosts all                     every [hosts.NAME] of paceline.toml
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline.communication import schedulers
from paceline.core.parse import like
from paceline.errors import UnsupportedError

MOST = 256
"""Most hosts of a run that one command starts: each is an ssh connection of this machine."""
_HOST = re.compile(
    r"(?:(?P<user>[\w.-]+)@)?(?:\[(?P<six>[0-9a-fA-F:.]+(?:%\w+)?)\]|(?P<name>\w[\w.-]*))(?::(?P<port>\d+))?"
)
_RANGES = re.compile(r"\w\[\d")
_KEYS = ("directory", "python", "workers", "environment", "address")


@dataclass(frozen=True)
class Host:
    """One host of the run."""

    name: str  # by which ssh knows it, and by which messages name it
    user: str | None = None  # user, port: for ssh; None as ssh's configuration says
    port: int | None = None
    workers: int | None = None  # on this host; None: as on the others
    directory: str | None = None  # where the program runs; None: the same path as here
    python: str | None = None  # the command of the Python that has paceline; None: the path of this one, else python3
    # variables of its workers, in addition to those that ssh's shell has
    environment: Mapping[str, str] = field(default_factory=dict)
    address: str | None = None  # by which the other hosts reach it; None: found by the check

    @property
    def destination(self) -> str:
        """For ssh: the name, with the user in front."""
        return self.name if self.user is None else f"{self.user}@{self.name}"


def read(text: str, tables: Mapping[str, Any], environment: Mapping[str, str]) -> list[Host]:
    """The hosts, in the order of their ranks.

    Args:
        text: of `--hosts`.
        tables: `[hosts.NAME]` of the settings file.
        environment: of this process, for Slurm's variables.

    Raises:
        UnsupportedError: nobody could be meant by it; the message says why.
    """
    settings = check(tables)
    found = [replace(host, **settings.get(host.name, {})) for host in _named(text.strip(), tables, environment)]
    if not found:
        raise UnsupportedError(f"--hosts {text!r} names no host; write for example --hosts a,b")
    names = [host.name for host in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise UnsupportedError(f"--hosts names {twice[0]} twice: name it once, and start more there with --workers")
    if len(found) > MOST:
        raise UnsupportedError(f"--hosts names {len(found)} hosts, and one command starts at most {MOST}")
    return found


def check(tables: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The fields of each host that its table sets.

    Raises:
        UnsupportedError: a table has an unknown setting, or a value of another type.
    """
    return {name: _settings(name, table) for name, table in tables.items()}


def _named(text: str, tables: Mapping[str, Any], environment: Mapping[str, str]) -> list[Host]:
    """Those that the text names, without their tables."""
    if text == "slurm":
        nodes = environment.get("SLURM_JOB_NODELIST")
        if not nodes:
            raise UnsupportedError("--hosts slurm, but SLURM_JOB_NODELIST is not set: take nodes first, with salloc")
        return [Host(name) for name in schedulers.expand(nodes)]
    if text == "all":
        if not tables:
            raise UnsupportedError("--hosts all, but no paceline.toml from here upwards has a table such as [hosts.a]")
        return [_host(name, "paceline.toml") for name in tables]
    if text.startswith("@") or "/" in text or ("," not in text and os.path.isfile(text)):
        return list(_of_file(Path(text.removeprefix("@"))))
    words = schedulers.expand(text) if _RANGES.search(text) else text.split(",")
    if not all(word.strip() for word in words) and text:
        raise UnsupportedError(f"--hosts {text!r} has an empty name: write for example --hosts a,b")
    return [_host(word.strip(), "--hosts") for word in words if word.strip()]


def _host(text: str, where: str) -> Host:
    match = _HOST.fullmatch(text)
    if match is None or not 0 < int(match["port"] or 22) < 65536:
        raise UnsupportedError(f"{where}: {text!r} is no host; write a name, USER@NAME or NAME:PORT (the port of ssh)")
    return Host(match["six"] or match["name"], match["user"], None if match["port"] is None else int(match["port"]))


def _of_file(path: Path) -> Iterator[Host]:
    """The hosts of a hostfile, one a line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        raise UnsupportedError(f"--hosts: the hostfile {path} cannot be read ({why})") from error
    for number, line in enumerate(lines, 1):
        name, *rest = line.partition("#")[0].split() or [""]
        if not name:
            continue
        host = _host(name, f"{path}, line {number}")
        for word in rest:
            key, _, value = word.partition("=")
            if key.replace("_", "-") == "max-slots":
                continue
            if key != "slots" or not value.isdecimal() or int(value) < 1:
                raise UnsupportedError(f"{path}, line {number}: {word!r} is not slots=N, as in: a slots=4")
            host = replace(host, workers=int(value))
        yield host


def _settings(name: str, table: Any) -> dict[str, Any]:
    """The fields of a host that its table sets."""
    where = f"[hosts.{name}]"
    if not isinstance(table, Mapping):
        raise UnsupportedError(f"hosts.{name} must be a table, got {table!r}: write {where} and below it its settings")
    for key, value in table.items():
        if key not in _KEYS:
            raise UnsupportedError(f"{where}: {key} is no setting of a host{like(key, list(_KEYS))}")
        _check(where, key, value)
    return {key: _texts(value) if key == "environment" else value for key, value in table.items()}


def _texts(table: Mapping[str, Any]) -> dict[str, str]:
    """Variables as text."""
    return {name: str(value) for name, value in table.items()}


def _check(where: str, key: str, value: Any) -> None:
    """Refuse a value of another type."""
    if key == "workers":
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise UnsupportedError(f"{where}: workers must be a number from 1, got {value!r}")
    elif key == "environment":
        plain = isinstance(value, Mapping) and all(isinstance(one, str | int | float) for one in value.values())
        if not plain or not all(re.fullmatch(r"[A-Za-z_]\w*", name) for name in value):
            raise UnsupportedError(f'{where}: environment must be a table such as {{ NAME = "value" }}, got {value!r}')
    elif not isinstance(value, str) or not value.strip() or "\n" in value or "\0" in value:
        raise UnsupportedError(f"{where}: {key} must be a text, got {value!r}")
