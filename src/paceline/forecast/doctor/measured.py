# SPDX-License-Identifier: Apache-2.0
"""What the doctor measures: plain values that go through JSON and come back the same.

Seconds are `_s`, bytes `_bytes`. A link is directed: what `source` sees when it talks to `target`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Machine:
    """One worker's surroundings.

    Attributes:
        rank: of the worker.
        host: its name.
        versions: of Python, torch, numpy, paceline and the operating system.
        cores: that this process may use.
        load: processes that wanted to run, on average over the last minute.
        memory_bytes: available; None where unknown.
        shm_bytes: free in /dev/shm; None where there is none.
        open_files: the soft limit; None where unknown.
        gpus: their names.
        interfaces: name -> IPv4 address, loopback included.
        resolved: addresses to which the host's own name leads, looked up on the host.
        asked_interface: GLOO_SOCKET_IFNAME, or empty.
        gloo_address: where gloo will listen; empty where it would find nothing.
    """

    rank: int
    host: str
    versions: dict[str, str] = field(default_factory=dict)
    cores: int = 1
    load: float = 0.0
    memory_bytes: int | None = None
    shm_bytes: int | None = None
    open_files: int | None = None
    gpus: list[str] = field(default_factory=list)
    interfaces: dict[str, str] = field(default_factory=dict)
    resolved: list[str] = field(default_factory=list)
    asked_interface: str = ""
    gloo_address: str = ""

    @property
    def gloo_interface(self) -> str:
        """The interface that has gloo's address; empty where none has."""
        return next((name for name, address in self.interfaces.items() if address == self.gloo_address), "")


@dataclass(frozen=True)
class MeasuredLink:
    """What one worker sees of another.

    Attributes:
        source, target: ranks.
        address: of the target that answered; empty where none did.
        problem: why nothing could be measured, as the system said it; empty where something was.
        gloo_problem: why gloo's own address of the target did not answer, where another did.
        latency_s: fastest round trip.
        bandwidth_bytes_s: from source to target; None where this pair was left out.
        clock_s: the target's clock minus the source's; right within `latency_s / 2`.
    """

    source: int
    target: int
    address: str = ""
    problem: str = ""
    gloo_problem: str = ""
    latency_s: float | None = None
    bandwidth_bytes_s: float | None = None
    clock_s: float | None = None


@dataclass(frozen=True)
class Measurements:
    """Everything that the workers found.

    Attributes:
        size: workers that should have come.
        machines: rank -> surroundings, of those who came.
        links: of every ordered pair of those who came.
        lost: ranks that came and then stopped answering.
        timeout_s: how long was waited for who did not come.
    """

    size: int
    machines: dict[int, Machine] = field(default_factory=dict)
    links: list[MeasuredLink] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    timeout_s: float = 30.0

    @property
    def missing(self) -> list[int]:
        """Ranks that never came."""
        return [rank for rank in range(self.size) if rank not in self.machines]

    @property
    def hosts(self) -> list[str]:
        """Names of the hosts, in order of their first rank."""
        return list(dict.fromkeys(machine.host for _, machine in sorted(self.machines.items())))

    def name(self, rank: int) -> str:
        """Rank and host as a person reads them."""
        machine = self.machines.get(rank)
        return f"rank {rank} on {machine.host}" if machine else f"rank {rank}"

    def names(self, ranks: list[int]) -> str:
        """Several of them."""
        return ", ".join(self.name(rank) for rank in ranks)

    def across(self) -> list[MeasuredLink]:
        """Links between hosts; on a single host, all of them."""
        if len(self.hosts) < 2:
            return self.links
        return [k for k in self.links if self.machines[k.source].host != self.machines[k.target].host]

    def to_json(self) -> dict[str, Any]:
        """As JSON knows it."""
        found = asdict(self)
        found["machines"] = [asdict(machine) for _, machine in sorted(self.machines.items())]
        return found


def machine_from_json(values: dict[str, Any]) -> Machine:
    """The inverse of `asdict`; unknown names are left out, so that versions may differ."""
    return Machine(**_known(Machine, values))


def link_from_json(values: dict[str, Any]) -> MeasuredLink:
    """The inverse of `asdict`."""
    return MeasuredLink(**_known(MeasuredLink, values))


def _known(kind: type[Machine] | type[MeasuredLink], values: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {name: value for name, value in values.items() if name in names}
