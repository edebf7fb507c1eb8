# SPDX-License-Identifier: Apache-2.0
"""The bandwidth between each pair of workers, and the groups of workers that are near each other.

The pairs are measured in N-1 (or N) rounds of disjoint pairs; a pair sends a few MB both ways at the same time, a few
times, and keeps the best. The pairs of a round compete for shared links, which makes slow links slower still and so
easier to tell from fast ones.

The logarithms of the bandwidths are cut into two classes, so that the variance between the classes is greatest (Otsu).
If the classes' mean bandwidths differ by less than a factor of 3, the network counts as uniform; otherwise workers
joined by a fast pair, directly or through other workers, form a group. All workers compute it from the same figures.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

from paceline.communication.base import Transport

BYTES = 1 << 20
REPEATS = 3
APART = 3.0
"""Least factor between the mean bandwidths of fast and slow pairs."""


def rounds(workers: int) -> list[list[tuple[int, int]]]:
    """Each pair of workers once, in rounds of disjoint pairs (round robin: one is fixed, the others rotate)."""
    ring: list[int] = list(range(workers + workers % 2))
    result = []
    for _ in range(len(ring) - 1):
        pairs = [(ring[k], ring[-1 - k]) for k in range(len(ring) // 2)]
        result.append([(min(p), max(p)) for p in pairs if max(p) < workers])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return result


def measure(transport: Transport, nbytes: int = BYTES) -> list[list[float]]:
    """Bytes a second each way between each pair of workers, 0 on the diagonal; the same figures on every worker."""
    rank, size = transport.world.rank, transport.world.size
    if transport.name == "virtual":  # nothing to measure, and runs must be repeatable
        hosts = transport.world.hosts
        return [[0.0 if i == j else 1e9 if hosts[i] == hosts[j] else 1e8 for j in range(size)] for i in range(size)]
    device = transport.wire_device(torch.device("cpu"))
    ours, theirs = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    best = [0.0] * size
    for pairs in rounds(size):
        transport.barrier()
        for pair in pairs:
            if rank in pair:
                other = pair[0] + pair[1] - rank
                both = (ours[:1], theirs[:1]), *((ours, theirs),) * REPEATS  # the first one synchronises them
                for x, y in both:
                    began = time.perf_counter()
                    arriving = transport.receive(y, other)
                    transport.send(x, other).wait()
                    arriving.wait()
                    if x.numel() == nbytes:
                        best[other] = max(best[other], nbytes / (time.perf_counter() - began))
    result: list[list[float]] = transport.gather_json(best)
    return [[min(result[i][j], result[j][i]) for j in range(size)] for i in range(size)]


def neighbours(matrix: Sequence[Sequence[float]]) -> list[int]:
    """For each worker the lowest rank of its group; all 0 on a uniform network. `matrix` is what `measure` gives."""
    size = len(matrix)
    logs = sorted(math.log(matrix[i][j]) for i in range(size) for j in range(i))
    cut, spread = 0, 0.0
    for k in range(1, len(logs)):
        below, above = sum(logs[:k]) / k, sum(logs[k:]) / (len(logs) - k)
        between = k * (len(logs) - k) * (above - below) ** 2
        if above - below >= math.log(APART) and between > spread:
            cut, spread = k, between
    if cut == 0:
        return [0] * size
    threshold = math.exp((logs[cut - 1] + logs[cut]) / 2)
    place = list(range(size))
    for i in range(size):
        for j in range(i):
            if matrix[i][j] >= threshold:
                low, high = sorted((place[i], place[j]))
                place = [low if p == high else p for p in place]
    return place
