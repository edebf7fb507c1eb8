# SPDX-License-Identifier: Apache-2.0
"""The checks of elastic runs before anything starts."""

from __future__ import annotations

import re
import socket
import time
from pathlib import Path

from paceline.cli.console import err, refuse
from paceline.cli.launch.cluster import address_text
from paceline.cli.run.checks import host_and_port

SAY_AFTER_S = 2.0
PROBE_S = 0.5  # to connect to the control plane
FIND_S = 60.0  # at most, for the launcher to join
ELASTIC_FILES = ("elastic.json", "control.json", "control.jsonl")
"""Records of an elastic run in its log directory: the launcher's, the control plane's, its events."""


def reachable(address: tuple[str, int]) -> bool:
    """Whether a connection succeeds."""
    try:
        socket.create_connection(address, timeout=PROBE_S).close()
        return True
    except OSError:
        return False


def workers(count: int, most: int | None) -> None:
    """Check the number of workers of this host."""
    if count < 0:
        refuse(f"--workers must be at least 0 (the control plane alone), got {count}")
    if most is None and count < 1:
        refuse(f"--join needs --workers of at least 1, got {count}")
    if most is not None and count > most:
        refuse(f"--workers {count} is more than the {most} that --elastic allows")


def rule(text: str | None) -> None:
    """Refuse rules that do not exchange blocks."""
    if text is None:
        return
    from paceline.rules.recipes import make_rule

    asked = make_rule(text, {})
    if asked.schedule.can_be_elastic:
        return
    if asked.schedule.survives_loss:
        refuse(
            f"--elastic needs a rule of blocks, such as bmuf, and {text} is asynchronous: its workers survive the "
            "loss of one without it, so leave --elastic out"
        )
    refuse(
        f"--elastic needs a rule of blocks, such as bmuf, and {text} exchanges gradients at each step: use "
        "--restarts N, which starts all workers again from the last checkpoint"
    )


def listen(text: str | None) -> tuple[str, int]:
    """The control plane's address: of this host, with a free port."""
    where = ("127.0.0.1", 0) if text is None else host_and_port("--listen", text, 0)
    if where[0] in ("0.0.0.0", "::"):
        refuse(f"--listen takes one address of this host, by which other hosts reach it, got {where[0]}")
    try:
        family, _, _, _, found = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0]
        socket.create_server((str(found[0]), where[1]), family=family).close()
    except OSError as error:
        refuse(f"--listen: cannot listen at {address_text(*where)}: {error.strerror or error}; choose another")
    return where


def join(text: str, timeout_s: float) -> tuple[str, int]:
    """The address of the control plane to join, once it listens."""
    where = host_and_port("--join", text, 0)
    wait_s = min(FIND_S, timeout_s)
    began = time.monotonic()
    until, say_at = began + wait_s, began + SAY_AFTER_S
    while not reachable(where):
        if time.monotonic() > say_at:
            say_at = until
            err().print(
                f"no launcher listens at {text} yet: waiting for it, {wait_s:g} s at most",
                markup=False,
                soft_wrap=True,
            )
        if time.monotonic() > until:
            refuse(
                f"--join: no launcher listens at {text} within {wait_s:g} s; start `paceline run --elastic MIN:MAX "
                f"--listen {text} ...` there first, and check that this host reaches it"
            )
        time.sleep(0.2)
    return where


def bounds(text: str) -> tuple[int, int]:
    """Fewest and most workers, of `2:8`."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        refuse(f"--elastic must be MIN:MAX such as 2:8, the fewest workers and the most, got {text!r}")
    fewest, most = int(match[1]), int(match[2])
    if not 1 <= fewest <= most:
        refuse(f"--elastic must be MIN:MAX with 1 <= MIN <= MAX, got {text}")
    return fewest, most


def seconds(timeout_s: float, grace_s: float | None) -> None:
    """Check the deadlines."""
    if not timeout_s >= 1:
        refuse(f"--timeout must be at least 1 second, got {timeout_s}")
    if grace_s is not None and not 0 < grace_s < timeout_s:
        refuse(f"--grace must lie above 0 and below --timeout ({timeout_s:g} s), got {grace_s:g}")


def vacant(directory: Path, overwrite: bool) -> None:
    """Refuse or remove the record of an earlier elastic run."""
    old = [directory / name for name in ELASTIC_FILES if (directory / name).exists()]
    if old and not overwrite:
        refuse(
            f"the log directory {directory} already holds an elastic run ({old[0].name}): continue it with "
            f"`paceline run --again {directory}`, give another directory, or add --overwrite to replace it"
        )
    for path in old:
        path.unlink()
