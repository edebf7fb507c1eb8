# SPDX-License-Identifier: Apache-2.0
"""Which links an operation loads: those of workers, of hosts and of racks, all groups of workers at the same time.

    ring among g workers      every worker sends its bytes to the next one of its group
    scatter among g           worker r sends s_j X to worker j of its group: out of a host with c of them, which own
                              the share S together, go c (1 - S) X, and S (g - c) X come in

X are a group's bytes and s_j the share of them that worker j owns, 1/m on each of the first m. A host's link, and a
rack's, carry what all groups send through them; the operation takes as long as the busiest link. The routes are those
of the rule (:class:`paceline.rules.topology.hierarchical.DimensionPlan`), with any number of dimensions and with hosts
of different sizes.

Source: as :mod:`.timing`; counting the bytes of every link is ours.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from paceline.rules.topology.base import Groups, Topology
from paceline_plugins.forecast.planner.network import Network, NetworkLink

PLANS = 256
"""Plans and loads that are kept."""


@dataclass(frozen=True)
class Loads:
    """The busiest links of one operation, in bytes a byte of X (scatter) or a byte that each worker sends (ring).

    Attributes:
        worker: of a worker's link within its host.
        host: of a host's link, all of its workers together.
        rack: of a rack's link, likewise.
        members: workers of the largest group.
    """

    worker: float
    host: float
    rack: float
    members: int

    def farthest(self, network: Network) -> NetworkLink:
        """The link of the longest hop."""
        return network.between if self.rack else network.across if self.host else network.within

    def seconds(self, network: Network, nbytes: float) -> float:
        """Until the busiest link has carried its part."""
        loads = ((self.worker, network.within), (self.host, network.across), (self.rack, network.between))
        return max(nbytes * load / link.bandwidth_bytes_s for load, link in loads)


@lru_cache(maxsize=PLANS)
def levels_of(topology: Topology, network: Network, workers: int) -> tuple[Groups, ...]:
    """The groups of each dimension of the rule's route, the slowest last."""
    return topology.levels(network.hosts(workers))


@lru_cache(maxsize=PLANS)
def ring(topology: Topology, network: Network, workers: int) -> Loads:
    """Of a ring along the slowest dimension."""
    flows = _Flows(network)
    groups = levels_of(topology, network, workers)[-1]
    for group in groups:
        for source, target in zip(group, [*group[1:], *group[:1]], strict=True):
            flows.add(source, target)
    return flows.busiest(groups)


@lru_cache(maxsize=PLANS)
def scatter(topology: Topology, network: Network, workers: int, level: int) -> Loads:
    """Of an all-to-all along dimension `level`, in which every worker of a group owns an equal share, as far as the
    smallest group goes; along the slowest one (-1) all do."""
    levels = levels_of(topology, network, workers)
    groups, last = levels[level], level in (-1, len(levels) - 1)
    flows = _Flows(network)
    for group in groups:
        flows.scatter(group, len(group) if last else min(map(len, groups)))
    return flows.busiest(groups)


def owners(topology: Topology, network: Network, workers: int) -> Iterator[int]:
    """Of each fast dimension, the workers among which a group's numbers are divided."""
    for groups in levels_of(topology, network, workers)[:-1]:
        yield min(map(len, groups))


class _Flows:
    """Bytes in and out of workers, hosts and racks."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._worker: list[float] = [0.0]
        self._out: dict[tuple[str, int], float] = defaultdict(float)
        self._into: dict[tuple[str, int], float] = defaultdict(float)

    def _places(self, rank: int) -> Iterator[tuple[str, int]]:
        """The host and the rack of a worker."""
        yield "host", self._network.host_of(rank)
        yield "rack", self._network.rack_of(rank)

    def add(self, source: int, target: int) -> None:
        """One byte from a worker to another."""
        near = source != target
        for here, there in zip(self._places(source), self._places(target), strict=True):
            if here != there:
                self._out[here] += 1.0
                self._into[there] += 1.0
                near = False
        if near:
            self._worker.append(1.0)

    def scatter(self, group: Sequence[int], least: int) -> None:
        """The flows of a group whose first `least` members own equal shares."""
        counts: dict[tuple[str, int], list[float]] = defaultdict(lambda: [0.0, 0.0])
        for number, rank in enumerate(group):
            for place in self._places(rank):
                counts[place][0] += 1.0
                counts[place][1] += 1 / least if number < least else 0.0
        for place, (count, share) in counts.items():
            self._out[place] += count * (1 - share)
            self._into[place] += share * (len(group) - count)
            if place[0] == "host":
                self._worker += [share - 1 / least if share else 0.0, (count - 1) / least if share else 0.0]

    def busiest(self, groups: Groups) -> Loads:
        """The largest sums."""
        most = {"host": 0.0, "rack": 0.0}
        for sums in (self._out, self._into):
            for (kind, _), nbytes in sums.items():
                most[kind] = max(most[kind], nbytes)
        small = 1e-9  # of rounding
        host, rack = (0.0 if most[kind] < small else most[kind] for kind in ("host", "rack"))
        return Loads(max(self._worker), host, rack, max(map(len, groups)))
