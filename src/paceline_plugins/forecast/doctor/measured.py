# SPDX-License-Identifier: Apache-2.0
"""The doctor's measurements, as dataclasses that go to JSON and back.

A link is directed: `source` measures the way to `target`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

Kind = TypeVar("Kind")


@dataclass(frozen=True)
class Machine:
    """One worker's machine."""

    rank: int  # of the worker
    host: str  # its name
    versions: dict[str, str] = field(default_factory=dict)  # of Python, torch, numpy, paceline and the operating system
    cores: int = 1  # that this process may use
    load: float = 0.0  # mean number of runnable processes over the last minute
    memory_bytes: int | None = None  # available; None where unknown
    shm_bytes: int | None = None  # free in /dev/shm; None where there is none
    open_files: int | None = None  # the soft limit; None where unknown
    gpus: list[str] = field(default_factory=list)  # their names
    interfaces: dict[str, str] = field(default_factory=dict)  # name -> IPv4 address, loopback included
    mtus: dict[str, int] = field(default_factory=dict)  # name -> largest packet in bytes, loopback excluded
    # name -> rate that a physical interface has negotiated with its switch; those that are down left out
    wires_mbit: dict[str, int] = field(default_factory=dict)
    resolved: list[str] = field(default_factory=list)  # addresses of the host's own name, looked up on the host
    asked_interface: str = ""  # GLOO_SOCKET_IFNAME, or empty
    gloo_address: str = ""  # where gloo will listen; empty where it would find no address

    @property
    def gloo_interface(self) -> str:
        """The interface that has gloo's address; empty where none has."""
        return next((name for name, address in self.interfaces.items() if address == self.gloo_address), "")


@dataclass(frozen=True)
class MeasuredLink:
    """One worker's measurement of another."""

    source: int  # source, target: ranks
    target: int
    address: str = ""  # address of the target that answered; empty without an answer
    problem: str = ""  # the system's error, where nothing could be measured
    gloo_problem: str = ""  # the error of the target's gloo address, where another address answered
    latency_s: float | None = None  # fastest round trip
    bandwidth_bytes_s: float | None = None  # from source to target; None where it was not measured
    clock_s: float | None = None  # the target's clock minus the source's; right within `latency_s / 2`


@dataclass(frozen=True)
class Measurements:
    """The measurements of all workers."""

    size: int  # expected workers
    machines: dict[int, Machine] = field(default_factory=dict)  # rank -> machine, of the workers that joined
    links: list[MeasuredLink] = field(default_factory=list)  # of every ordered pair of them
    lost: list[int] = field(default_factory=list)  # ranks that joined and then stopped answering
    timeout_s: float = 30.0  # how long to wait for workers to join

    @property
    def missing(self) -> list[int]:
        """Ranks that never joined."""
        return [rank for rank in range(self.size) if rank not in self.machines]

    @property
    def hosts(self) -> list[str]:
        """Host names, in order of their first rank."""
        return list(dict.fromkeys(machine.host for _, machine in sorted(self.machines.items())))

    def name(self, rank: int) -> str:
        """Rank and host, for people."""
        machine = self.machines.get(rank)
        return f"rank {rank} on {machine.host}" if machine else f"rank {rank}"

    def names(self, ranks: list[int]) -> str:
        """Ranks and hosts, for people."""
        return ", ".join(self.name(rank) for rank in ranks)

    def across(self) -> list[MeasuredLink]:
        """Links between hosts; on a single host, all of them."""
        if len(self.hosts) < 2:
            return self.links
        return [k for k in self.links if self.machines[k.source].host != self.machines[k.target].host]

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        found = asdict(self)
        found["machines"] = [asdict(machine) for _, machine in sorted(self.machines.items())]
        return found


def from_json(kind: type[Kind], values: dict[str, Any]) -> Kind:
    """The inverse of `asdict`; unknown names are ignored, so that versions may differ."""
    names = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    return kind(**{name: value for name, value in values.items() if name in names})
