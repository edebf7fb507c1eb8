# SPDX-License-Identifier: Apache-2.0
"""What a scheduler says: the hosts of a job, to a launcher; its place among all workers, to a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UnsupportedError

Environment = Mapping[str, str]
PORTS = range(10_000, 30_000)
"""Where jobs meet: below the kernel's ephemeral ports."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, as one launcher on each of them is told.

    Attributes:
        says: who says so, for messages.
        index: of this host.
        count: of hosts; None where only the user knows.
        master: address of host 0 and a port that is the same on all hosts; None on one host.
        workers: on this host; None where nothing says so.
        name: of the job, the same on all hosts and for no other; "" where nothing says so.
    """

    says: str
    index: int = 0
    count: int | None = 1
    master: tuple[str, int] | None = None
    workers: int | None = None
    name: str = ""


@dataclass(frozen=True)
class Worker:
    """This process among all workers of a job.

    Attributes:
        says: who says so, for messages.
        rank: of this worker.
        size: number of workers.
        local_rank: on this host.
        local_size: workers on this host.
        master: where the workers meet; None where they have to agree on that themselves.
        env: whether torch.distributed finds the same in variables of its own.
    """

    says: str
    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    master: tuple[str, int] | None = None
    env: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise UnsupportedError(f"{self.says}: the rank must lie in 0..{self.size - 1}, got {self.rank}")


def number(environment: Environment, name: str, default: int | None = None) -> int:
    """The whole number of that variable.

    Raises:
        UnsupportedError: it is not set and has no default, or is no number.
    """
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        what = f"is {text!r}" if text else "is not set"
        raise UnsupportedError(f"{name} must be a whole number, and {what}: was it changed after the job began?")
    return int(text)


def master(environment: Environment) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT, where both are set."""
    if not (environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")):
        return None
    return environment["MASTER_ADDR"], number(environment, "MASTER_PORT")
