# SPDX-License-Identifier: Apache-2.0
"""A scheduler's job: its hosts, for a launcher; and its ranks, for a worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UnsupportedError

Environment = Mapping[str, str]
PORTS = range(10_000, 30_000)
"""Ports for the stores of jobs: below the kernel's ephemeral ports."""


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job, with one launcher on each.

    Attributes:
        says: the source of this information, for messages.
        index: of this host.
        count: of hosts; None if only the user knows it.
        master: address of host 0 and a port that is the same on all hosts; None on one host.
        workers: on this host; None if unknown.
        name: unique to the job, the same on all hosts; "" if unknown.
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
        says: the source of this information, for messages.
        rank: of this worker.
        size: number of workers.
        local_rank: on this host.
        local_size: workers on this host.
        master: the address of the store; None if the workers have to agree on it.
        env: whether torch.distributed's own variables are set.
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
    """The whole number in a variable; UnsupportedError if it has no number and no default."""
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not text.isdecimal():
        what = f"is {text!r}" if text else "is not set"
        raise UnsupportedError(f"{name} must be a whole number, and {what}: was it changed after the job began?")
    return int(text)


def master(environment: Environment) -> tuple[str, int] | None:
    """MASTER_ADDR and MASTER_PORT, if both are set."""
    if not (environment.get("MASTER_ADDR") and environment.get("MASTER_PORT")):
        return None
    return environment["MASTER_ADDR"], number(environment, "MASTER_PORT")
