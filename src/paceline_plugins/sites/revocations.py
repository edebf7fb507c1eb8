# SPDX-License-Identifier: Apache-2.0
"""Requests to revoke certificates, as files in the log directory of the launcher that hosts the control plane.

::

    revoke-NAME.request.json     what to revoke
    revoke-NAME.answer.json      the workers that were put out, or why it was refused

Who may write to that directory may end the run as well, so there is no further secret. A request that no launcher has
answered is carried out by the next one, of `paceline run --again`.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError

REQUEST, ANSWER = ".request.json", ".answer.json"
LIMIT_BYTES = 1 << 20
Revoke = Callable[[list[int], list[str], bool, str], list[int]]


@dataclass(frozen=True)
class Request:
    """What to revoke."""

    workers: list[int]  # numbers of workers
    certificates: list[str]  # IDs of certificates
    unknown: bool  # whether all certificates that have not joined are refused
    why: str  # for messages


def post(directory: Path, request: Request) -> str:
    """Write a request; returns its name."""
    name = f"revoke-{secrets.token_hex(8)}"
    _write(directory / f"{name}{REQUEST}", asdict(request))
    return name


def answer_to(directory: Path, name: str) -> dict[str, Any] | None:
    """The answer, once: its files are removed. None if there is none yet."""
    path = directory / f"{name}{ANSWER}"
    try:
        said: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    path.unlink()
    return said


def serve(directory: Path, revoke: Revoke) -> None:
    """Carry out the requests in the directory, and answer them."""
    for path in sorted(directory.glob(f"revoke-*{REQUEST}")):
        try:
            workers = revoke(*_read(path))
            said: dict[str, Any] = {"workers": workers}
        except (PacelineError, OSError, ValueError, KeyError, TypeError) as error:
            said = {"refused": str(error) or type(error).__name__}
        with contextlib.suppress(OSError):  # on a full disk it is carried out, and the command says that it waits
            _write(path.with_name(path.name.removesuffix(REQUEST) + ANSWER), said)
        with contextlib.suppress(OSError):
            path.unlink()


def _read(path: Path) -> tuple[list[int], list[str], bool, str]:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        said = json.loads(file.read(LIMIT_BYTES))
    workers, certificates, why = said["workers"], said["certificates"], said["why"]
    if not all(type(one) is int for one in workers) or not all(isinstance(one, str) for one in [*certificates, why]):
        raise ValueError(f"{path.name} is no request to revoke certificates")
    return workers, certificates, said["unknown"] is True, why[:500]


def _write(path: Path, said: dict[str, Any]) -> None:
    new = path.with_name(f".{path.name}.new")
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "w", encoding="utf-8") as file:
        json.dump(said, file)
    new.replace(path)
