# SPDX-License-Identifier: Apache-2.0
"""Who owns which elements, and in which pieces."""

from __future__ import annotations

from itertools import pairwise

import pytest

from paceline.rules.codec.dense import Dense
from paceline.rules.codec.layout import Layout
from paceline.rules.topology import Sharded

SIZES = [0, 1, 63, 64, 65, 128, 1000, 4096, 100_003, 1_000_000]
WORKERS = [1, 2, 3, 4, 7, 16]


@pytest.mark.parametrize("workers", WORKERS)
def test_slices_and_pieces_cover_every_element_once(workers: int) -> None:
    for numel in SIZES:
        slices = Sharded().slices(numel, workers)
        assert len(slices) == workers and slices[0][0] == 0 and slices[-1][1] == numel, numel
        assert all(before[1] == after[0] for before, after in pairwise(slices)), numel
        assert all(begin <= end and (end % 64 == 0 or end == numel) for begin, end in slices), numel
        for piece in (64, 192, 1024, 262_144):
            pieces = Sharded(piece).pieces(numel, workers)
            ends = [0] + [cut.end for cut in pieces]
            assert [cut.begin for cut in pieces] == ends[:-1] and ends[-1] == numel, (numel, piece)
            assert all(0 < cut.numel <= piece and cut.begin % 64 == 0 for cut in pieces), (numel, piece)
            assert all(slices[cut.owner][0] <= cut.begin and cut.end <= slices[cut.owner][1] for cut in pieces)


@pytest.mark.parametrize("workers", WORKERS)
def test_slices_are_as_even_as_units_allow(workers: int) -> None:
    for units in (1, 5, 6, 17, 1000, 12_345):
        sizes = [(end - begin) // 64 for begin, end in Sharded().slices(64 * units, workers)]
        assert max(sizes) - min(sizes) <= 1 and sum(sizes) == units


@pytest.mark.parametrize("workers", WORKERS)
def test_no_worker_owns_or_sends_much_more_than_the_mean(workers: int) -> None:
    for numel in (320 * workers, 320 * workers + 1, 100_003, 3_000_017):
        sizes = [end - begin for begin, end in Sharded().slices(numel, workers)]
        assert max(sizes) <= 1.2 * numel / workers
        sent = [Sharded().bytes_sent(Dense(), Layout.vector(numel), ["h"] * workers, r) for r in range(workers)]
        assert max(sent) <= 1.2 * sum(sent) / workers
        assert sum(sent) == 2 * (workers - 1) * 4 * numel


def test_bytes_by_hand() -> None:
    """Two workers of one unit each: push the other's 64 numbers, answer with one's own."""
    topology = Sharded(64)
    assert [topology.bytes_sent(Dense(), Layout.vector(128), ["a", "b"], r) for r in (0, 1)] == [512, 512]
    assert [topology.frames_sent(128, 2, r) for r in (0, 1)] == [2, 2]
    # three workers, the owner of nothing only pushes; the owner of all only answers
    assert [Sharded().frames_sent(64, 3, r) for r in range(3)] == [1, 1, 2]
    assert [Sharded().bytes_sent(Dense(), Layout.vector(64), ["h"] * 3, r) for r in range(3)] == [256, 256, 512]
    assert Sharded().bytes_sent(Dense(), Layout.vector(0), ["h"] * 3, 0) == 0
