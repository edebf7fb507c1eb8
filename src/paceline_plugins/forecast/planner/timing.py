# SPDX-License-Identifier: Apache-2.0
"""How long an exchange takes over a route: latencies and bytes, of each operation that the codec makes.

    ring all-reduce among N        2 (N-1) alpha + 2 (N-1)/N S / B            (reduce-scatter, then all-gather)
    all-to-all among N             alpha + (N-1) o + D / B
    hierarchical                   two all-to-alls along each fast dimension, one before and one after the codec's
                                   exchange of the shard along the slowest

alpha is a message's latency, B the bandwidth, o a processor's time a message, S the payload, D the bytes that leave.
The bytes are the recipe's own (`bytes_sent`, `slow_bytes` of the topology), as are the operations: the codec is run
once, on a few numbers and a wire that writes down what it is asked for. B is that of the busiest link: of a worker, of
a host or of a rack, each of which carries the bytes of all groups (:mod:`.loads`). alpha is that of the longest hop.

An exchange is cut into C chunks of which F are on their way at a time; b is the time of a chunk's bytes, L that of its
latencies:

    T = (L + b) + (C - 1) max(b, (L + b) / F)

so latency is paid once where the wire is busy, and C/F times where it is idle in between. The header, an all-gather
around a ring, is under way at the same time; the footer of gradients comes after all.

Sources: Thakur, Rabenseifner & Gropp, IJHPCA 19 (2005), for the collectives; Cho et al., MLSys 2019 (BlueConnect), for
the hierarchical one; the pipeline is ours (:mod:`paceline.update.exchange.exchanger`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.communication.base import CompletedOperation
from paceline.rules.codec import Codec, Dense, Layout, Steps
from paceline.rules.rule import Rule
from paceline.rules.topology import Flat
from paceline.rules.topology.base import Topology
from paceline.rules.traffic import FOOTER_BYTES, HEADER_BYTES, overhead_bytes
from paceline.update.engine.blocks.outer_state import cut
from paceline.update.exchange.exchanger import IN_FLIGHT
from paceline_plugins.forecast.planner.loads import Loads, owners, ring, scatter
from paceline_plugins.forecast.planner.network import Network

AFTER_WARMUP = 1 << 30
"""Number of an exchange after every warm-up."""
SAMPLE = Layout.of([(64, 64)])
SUM, ALL_TO_ALL = "sum", "all_to_all"


@dataclass(frozen=True)
class OperationTime:
    """The time of one operation on the wire, before it is cut into chunks.

    Attributes:
        latency_s: of each chunk.
        bytes_s: for all chunks together.
    """

    latency_s: float
    bytes_s: float


@dataclass(frozen=True)
class ExchangeTime:
    """The time of one exchange, from the arrival of the last worker.

    Attributes:
        payload_s: of the payload.
        header_s: of the header, which is under way at the same time.
        footer_s: of the footer, after the payload; for gradients.
        chunks: pieces of the payload.
        sent_bytes: by one worker, the header included.
    """

    payload_s: float
    header_s: float
    footer_s: float
    chunks: int
    sent_bytes: float

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

    rank, size = 0, 2

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
