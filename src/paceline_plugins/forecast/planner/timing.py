# SPDX-License-Identifier: Apache-2.0
"""How long an exchange takes over a route: latencies and bytes, of each operation that the codec makes.

    ring all-reduce among N        2 (N-1) alpha + 2 (N-1)/N S / B            (reduce-scatter, then all-gather)
    all-to-all among N             alpha + (N-1) o + D / B
    hierarchical                   two all-to-alls along each fast dimension, one before and one after the codec's
                                   exchange of the shard along the slowest

alpha is a message's latency, B the bandwidth, o a processor's time a message, S the payload, D the bytes that leave.
The bytes are the recipe's own (`bytes_sent`, `slow_bytes` of the topology), as are the operations: the codec is run
once, on a few numbers and a wire that writes down what it is asked for. B is that of the busiest link: of a worker, of
a host or of a rack, each of which carries the bytes of all groups (:mod:`.timing`). alpha is that of the longest hop.

An exchange is cut into C chunks of which F are on their way at a time; b is the time of a chunk's bytes, L that of its
latencies:

    T = (L + b) + (C - 1) max(b, (L + b) / F)

so latency is paid once where the wire is busy, and C/F times where it is idle in between. The header, an all-gather
around a ring, is under way at the same time; the footer of gradients comes after all.

Sources: Thakur, Rabenseifner & Gropp, IJHPCA 19 (2005), for the collectives; Cho et al., MLSys 2019 (BlueConnect), for
the hierarchical one; the pipeline is ours (:mod:`paceline.update.exchange.exchanger`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from paceline.communication.base import CompletedOperation
from paceline.rules.codec import Codec, Dense, Layout, Steps
from paceline.rules.rule import Rule
from paceline.rules.topology import Flat
from paceline.rules.topology.base import Groups, Topology
from paceline.rules.traffic import FOOTER_BYTES, HEADER_BYTES, overhead_bytes
from paceline.update.engine.blocks.outer_state import cut
from paceline.update.exchange.exchanger import IN_FLIGHT
from paceline_plugins.forecast.planner.network import Network, NetworkLink

# Which links an operation loads: those of workers, of hosts and of racks, all groups of workers at the same time.
#
#     ring among g workers      every worker sends its bytes to the next one of its group
#     scatter among g           worker r sends s_j X to worker j of its group: out of a host with c of them, which own
#                               the share S together, go c (1 - S) X, and S (g - c) X come in
#
# X are a group's bytes and s_j the share of them that worker j owns, 1/m on each of the first m. A host's link, and a
# rack's, carry what all groups send through them; the operation takes as long as the busiest link. The routes are
# those of the rule (:class:`paceline.rules.topology.hierarchical.DimensionPlan`), with any number of dimensions and
# with hosts of different sizes.
#
# Source: as :mod:`.timing`; counting the bytes of every link is ours.

PLANS = 256
"""Plans and loads that are kept."""


@dataclass(frozen=True)
class Loads:
    """The busiest links of one operation, in bytes a byte of X (scatter) or a byte that each worker sends (ring)."""

    worker: float  # of a worker's link within its host
    host: float  # of a host's link, all of its workers together
    rack: float  # of a rack's link, likewise
    members: int  # workers of the largest group

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


AFTER_WARMUP = 1 << 30
"""Number of an exchange after every warm-up."""
SAMPLE = Layout.of([(64, 64)])
SUM, ALL_TO_ALL = "sum", "all_to_all"


@dataclass(frozen=True)
class OperationTime:
    """The time of one operation on the wire, before it is cut into chunks."""

    latency_s: float  # of each chunk
    bytes_s: float  # for all chunks together


@dataclass(frozen=True)
class ExchangeTime:
    """The time of one exchange, from the arrival of the last worker."""

    payload_s: float  # of the payload
    header_s: float  # of the header, which is under way at the same time
    footer_s: float  # of the footer, after the payload; for gradients
    chunks: int  # pieces of the payload
    sent_bytes: float  # by one worker, the header included

    @property
    def total_s(self) -> float:
        """All of it, without overlap."""
        return max(self.payload_s, self.header_s) + self.footer_s

    def exposed_s(self, backward_s: float) -> float:
        """The part after a backward pass of so many seconds, when gradients are sent during the pass.

        Chunk k of C is ready k/C through the pass, and the wire takes one after another:

            left = max(T/C, T - (1 - 1/C) backward)

        so one chunk at least, and all of T but the pass after the first chunk. Source: Li et al., VLDB 2020 (buckets
        of DistributedDataParallel); the formula is the finish of a queue with evenly spaced arrivals.
        """
        body = max(self.payload_s / self.chunks, self.payload_s - (1 - 1 / self.chunks) * backward_s)
        return max(body, self.header_s - backward_s) + self.footer_s


class RecordingWire:
    """A wire between two workers that only records the operations."""

    rank = 0
    size = 2

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def sum(self, x: Tensor) -> Steps[None]:
        self.kinds.append(SUM)
        yield CompletedOperation()

    def all_to_all(self, out: Tensor, x: Tensor, out_sizes: list[int], in_sizes: list[int]) -> CompletedOperation:
        self.kinds.append(ALL_TO_ALL)
        return CompletedOperation()

    def space(self, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=device)


def operations_of(codec: Codec) -> tuple[str, ...]:
    """The operations of one exchange under this codec, one after another: "sum" or "all_to_all"."""
    wire = RecordingWire()
    deque(codec.exchange(torch.zeros(SAMPLE.numel), SAMPLE, wire, {}), maxlen=0)
    return tuple(wire.kinds)


def exchange(rule: Rule, layout: Layout, dense: int, network: Network, workers: int) -> ExchangeTime:
    """The time of one exchange under a collective rule.

    Args:
        rule: the rule.
        layout: the numbers that its codec encodes.
        dense: further 32-bit numbers that are sent without the codec (buffers, moments).
        network: between the workers.
        workers: N.
    """
    if workers == 1:
        return ExchangeTime(0.0, 0.0, 0.0, 1, 0.0)
    chunks, payload_s, sent = 0, 0.0, 0.0
    for codec, part in ((rule.codec.at(AFTER_WARMUP), layout), (Dense(), Layout.vector(dense))):
        if part.numel:
            found = list(_operations(rule, codec, part, network, workers))
            pieces = len(cut(part, rule.common.chunks, codec))
            payload_s += chunked_s(found, pieces)
            chunks += pieces
            sent += rule.common.bytes_sent(codec, part, network.hosts(workers), 0)
    link = network.farthest(workers)
    ring_s = [(workers - 1) * link.seconds(nbytes) for nbytes in (HEADER_BYTES, FOOTER_BYTES)]
    footer_s = ring_s[1] if rule.schedule.sends_footer else 0.0
    return ExchangeTime(payload_s, ring_s[0], footer_s, max(1, chunks), sent + overhead_bytes(rule, workers))


def chunked_s(operations: list[OperationTime], chunks: int, in_flight: int = IN_FLIGHT) -> float:
    """T of this file's docstring: operations are sequential, chunks are pipelined."""
    latency_s = sum(operation.latency_s for operation in operations)
    bytes_s = sum(operation.bytes_s for operation in operations) / chunks
    alone_s = latency_s + bytes_s
    return alone_s + (chunks - 1) * max(bytes_s, alone_s / min(in_flight, chunks))


def _operations(rule: Rule, codec: Codec, layout: Layout, network: Network, workers: int) -> Iterator[OperationTime]:
    """The operations of one exchange over the rule's route."""
    topology, group_bytes = rule.common, 4.0 * layout.numel
    for level, least in enumerate(owners(topology, network, workers)):
        along = scatter(topology, network, workers, level)
        for _ in range(2):  # there and back
            yield _scattered(along, network, group_bytes)
        group_bytes /= least
    slow = topology.slow_bytes(codec, layout, network.hosts(workers), 0)
    a_sum = (ALL_TO_ALL,) * 2 if topology.ordered else (SUM,)
    kinds = [kind for one in operations_of(codec) for kind in (a_sum if one == SUM else (one,))]
    for kind in kinds:
        yield operation(kind, slow / len(kinds), network, workers, topology)


FLAT = Flat()


def operation(kind: str, sent: float, network: Network, workers: int, topology: Topology = FLAT) -> OperationTime:
    """One operation along a route's slowest dimension, in which each worker sends so many bytes; see this file's
    docstring."""
    if workers == 1:
        return OperationTime(0.0, 0.0)
    if kind == SUM:
        along = ring(topology, network, workers)
        hops = 2 * (along.members - 1)
        return OperationTime(hops * along.farthest(network).latency_s, along.seconds(network, sent))
    along = scatter(topology, network, workers, -1)
    return _scattered(along, network, sent * along.members / (along.members - 1))


def _scattered(along: Loads, network: Network, group_bytes: float) -> OperationTime:
    """An all-to-all of a group's bytes."""
    link = along.farthest(network)
    latency_s = link.latency_s + (along.members - 1) * link.message_s
    return OperationTime(latency_s, along.seconds(network, group_bytes))


def scattered_s(sent: float, network: Network, workers: int) -> float:
    """Seconds of the bytes when each worker sends `sent` bytes, equally to all other workers."""
    return operation(ALL_TO_ALL, sent, network, workers).bytes_s
