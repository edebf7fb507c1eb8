# SPDX-License-Identifier: Apache-2.0
"""A network for the planner: links of hosts to a switch, faster links within a host, and racks of hosts.

    time of a message of n bytes = latency + n / bandwidth             (Hockney's alpha-beta model)

A `NetworkLink` has the latency from one worker to another, one way, and the bandwidth in each direction. Where several
workers share a host, they share its link to the others; among themselves they have the link `within`. Hosts of a rack
share the rack's link `between` racks likewise.

Bandwidths of presets are what a program gets, not what is printed on the box: of a frame of 1538 bytes on an Ethernet
wire, 1448 are TCP's payload (94 %).

Source: R. Hockney, Parallel Computing 20 (1994), for alpha and beta; Culler et al., PPoPP 1993 (LogP), for the
processor's time a message.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from paceline.core.parse import like, read_call
from paceline.errors import RuleError
from paceline_plugins.forecast.doctor.measured import Machine, MeasuredLink, from_json

ETHERNET = 1448 / 1538
"""Share of TCP payload on an Ethernet wire, at the usual frame of 1500 bytes."""
GIGABIT = 1e9 / 8


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True)
class NetworkLink:
    """The link from one worker to another."""

    latency_s: float = 0.0  # seconds of a message without its bytes, one way
    bandwidth_bytes_s: float = math.inf  # bytes a second in each direction
    message_s: float = 0.0  # processor seconds a message, when many are sent at once

    def __post_init__(self) -> None:
        for name, value in (("latency_s", self.latency_s), ("message_s", self.message_s)):
            if not _number(value) or not 0 <= value < math.inf:
                raise RuleError(f"{name} of a link must be a number of seconds, at least 0, got {value!r}")
        if not _number(self.bandwidth_bytes_s) or not self.bandwidth_bytes_s > 0:
            raise RuleError(f"bandwidth_bytes_s of a link must be above 0, got {self.bandwidth_bytes_s!r}")

    def seconds(self, nbytes: float) -> float:
        """Seconds of a message of `nbytes`."""
        return self.latency_s + nbytes / self.bandwidth_bytes_s

    def shared(self, by: int) -> NetworkLink:
        """The share of each of `by` workers that use it at once."""
        return NetworkLink(self.latency_s, self.bandwidth_bytes_s / by, self.message_s)


@dataclass(frozen=True)
class Network:
    """Hosts of `per_host` workers each, in racks of `per_rack` hosts each."""

    name: str  # for messages
    across: NetworkLink  # a host's link to other hosts; of its rack, if there are racks
    within: NetworkLink = NetworkLink()  # the link between workers of a host; not used with one worker a host
    per_host: int = 1  # workers of a host
    # a rack's link to other racks; not used without racks. Its latency is that from a host to one of another rack.
    between: NetworkLink = NetworkLink()
    per_rack: int = 0  # hosts of a rack; 0 where all hosts are at one switch

    def __post_init__(self) -> None:
        for name, value, what, least in (
            ("per_host", self.per_host, "workers", 1),
            ("per_rack", self.per_rack, "hosts", 0),
        ):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RuleError(f"{name} must be a whole number of {what}, at least {least}, got {value!r}")

    def hosts(self, workers: int) -> tuple[str, ...]:
        """The host of each worker, by rank."""
        return tuple(f"host{self.host_of(rank)}" for rank in range(workers))

    def host_of(self, rank: int) -> int:
        """The number of a worker's host; ranks fill one after another."""
        return rank // self.per_host

    def rack_of(self, rank: int) -> int:
        """The number of a worker's rack, likewise."""
        return self.host_of(rank) // self.per_rack if self.per_rack else 0

    def near(self, workers: int) -> int:
        """Workers of the first host."""
        return min(self.per_host, workers)

    def farthest(self, workers: int) -> NetworkLink:
        """The link of the longest way between two workers."""
        if self.rack_of(workers - 1):
            return self.between
        return self.across if self.host_of(workers - 1) else self.within

    def describe(self) -> str:
        """In words."""
        words = f"{self.name}: {_link_words(self.across)}"
        if self.per_host > 1:
            words += f" a host, {self.per_host} workers a host, {_link_words(self.within)} among them"
        if self.per_rack:
            words += f"; {self.per_rack} hosts a rack, {_link_words(self.between)} from a rack to the others"
        return words


def _link_words(link: NetworkLink) -> str:
    speed = link.bandwidth_bytes_s * 8
    scale, unit = (1e9, "Gbit/s") if speed >= 1e9 else (1e6, "Mbit/s")
    rate = "no limit of bandwidth" if math.isinf(speed) else f"{speed / scale:.3g} {unit}"
    return f"{rate} and {1e3 * link.latency_s:.3g} ms one way"


PRESETS: dict[str, Network] = {
    network.name: network
    for network in (
        Network("1gbe", NetworkLink(50e-6, ETHERNET * GIGABIT, 5e-6)),
        Network("10gbe", NetworkLink(25e-6, ETHERNET * 10 * GIGABIT, 5e-6)),
        Network("infiniband", NetworkLink(2e-6, 0.97 * 100 * GIGABIT, 1e-6)),
        Network(
            "nvlink", NetworkLink(15e-6, ETHERNET * 25 * GIGABIT, 3e-6), NetworkLink(3e-6, 240e9, 1e-6), per_host=8
        ),
        Network("wan", NetworkLink(25e-3, ETHERNET * 0.2 * GIGABIT, 5e-6)),
    )
}
"""By name: Ethernet of 1 and 10 Gbit/s through one switch; InfiniBand of 100 Gbit/s; eight GPUs on NVLink a host and 25
Gbit/s of Ethernet between hosts; and hosts in several cities with 200 Mbit/s each."""


def network_from_text(text: str) -> Network:
    """A preset's name, `link(mbit=500, ms=1)`, or the path of a JSON file.

    In `link`, mbit is the payload bandwidth of a host's link in each direction, ms the latency one way; with `per_host`
    workers a host, `within_mbit` and `within_ms` are those of the link between them; with `per_rack` hosts a rack,
    `rack_mbit` and `rack_ms` are those of a rack's link to the other racks.

    Raises:
        RuleError: other text, or invalid numbers.
    """
    if text in PRESETS:
        return PRESETS[text]
    if Path(text).is_file():
        return network_from_file(Path(text))
    if not text.strip().startswith("link("):
        names = list(PRESETS)
        raise RuleError(
            f"there is no network {text!r}{like(text, names)}; give one of {', '.join(names)}, a measure such as "
            '"link(mbit=500, ms=1)", or a JSON file (paceline doctor --json writes one)'
        )
    _, given = read_call(text, "network", "link(mbit=500, ms=1)")
    known = ("mbit", "ms", "per_host", "within_mbit", "within_ms", "per_rack", "rack_mbit", "rack_ms")
    for name, value in given.items():
        if name not in known:
            raise RuleError(f"link has no setting {name!r}{like(name, list(known))}; it has {', '.join(known)}")
        if not _number(value):
            raise RuleError(f"{name} in {text!r} must be a number, got {value!r}")
    across = NetworkLink(given.get("ms", 0.0) / 1e3, given.get("mbit", 1000.0) * 1e6 / 8)
    within = NetworkLink(given.get("within_ms", 0.0) / 1e3, given.get("within_mbit", math.inf) * 1e6 / 8)
    if "per_rack" not in given and {"rack_mbit", "rack_ms"} & set(given):
        raise RuleError(f"{text!r} has a link between racks, and no racks; give per_rack, the hosts of a rack")
    between = NetworkLink(given.get("rack_ms", 0.0) / 1e3, given.get("rack_mbit", math.inf) * 1e6 / 8)
    return Network(text, across, within, given.get("per_host", 1), between, given.get("per_rack", 0))


def network_from_file(path: Path) -> Network:
    """The network that `paceline doctor --json` measured.

    Its bandwidth is that of the slowest link, which limits a collective exchange; its latency is half the median of the
    fastest round trips.
    """
    name = path.stem
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        machines = [from_json(Machine, row) for row in values.get("machines", [])]
        links = [from_json(MeasuredLink, row) for row in values["links"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RuleError(
            f"{path} has no measurements of paceline doctor --json ({type(error).__name__}: {error}); run it again, or "
            'write "link(mbit=500, ms=1)"'
        ) from error
    host_of = {machine.rank: machine.host for machine in machines}
    inside = [link for link in links if host_of.get(link.source) == host_of.get(link.target)]
    outside = [link for link in links if link not in inside]
    if not outside:  # one host: its workers stand for hosts
        return Network(name, _slowest(inside, name))
    per_host = max(Counter(machine.host for machine in machines).values(), default=1)
    within = _slowest(inside, name) if inside and per_host > 1 else NetworkLink()
    return Network(name, _slowest(outside, name), within, per_host)


def _slowest(links: list[MeasuredLink], name: str) -> NetworkLink:
    speeds = [link.bandwidth_bytes_s for link in links if link.bandwidth_bytes_s]
    trips = [link.latency_s for link in links if link.latency_s is not None]
    if not speeds or not trips:
        raise RuleError(
            f"the measurements {name} hold no link with a bandwidth and a latency; run paceline doctor --json with at "
            "least two workers that reach each other"
        )
    return NetworkLink(median(trips) / 2, min(speeds))
