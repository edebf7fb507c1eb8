# SPDX-License-Identifier: Apache-2.0
"""Going first through what is in the cache: always a permutation, and hits as many as the cache has files."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from paceline.data.cache import Cache, keep_hits
from tests.data.cache.server import Server


def test_by_hand() -> None:
    assert keep_hits(["d", "b", "a", "c"], {"a", "b"}) == ["b", "a", "d", "c"]
    assert keep_hits(["d", "b"], []) == ["d", "b"] and keep_hits([], ["a"]) == []
    assert keep_hits(["a", "b", "a"], ["a", "x"]) == ["a", "a", "b"]


@pytest.mark.parametrize("seed", range(20))
def test_it_is_a_permutation_whatever_is_said_of_the_cache(seed: int) -> None:
    draw = random.Random(seed)
    order = [str(draw.randrange(30)) for _ in range(40)]
    cached = [str(draw.randrange(60)) for _ in range(draw.randrange(60))]
    found = keep_hits(order, cached)
    assert Counter(found) == Counter(order)
    for part in (set(cached), set(order) - set(cached)):  # each part keeps its order
        assert [u for u in found if u in part] == [u for u in order if u in part]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kept", [True, False])
def test_hits_of_later_epochs_with_half_the_epoch_as_the_cap(
    server: Server, tmp_path: Path, kept: bool, shuffle: bool
) -> None:
    urls = [server.put(str(i), bytes([i]) * 100) for i in range(12)]
    with Cache(tmp_path, 600) as cache:
        hits = []
        for epoch in range(4):
            order = random.Random(epoch).sample(urls, 12) if shuffle else urls
            if kept:
                order = keep_hits(order, cache.cached(order))
            for url in order:
                cache.read(url)
            hits.append(cache.stats()[server.address].hits - sum(hits))
    if kept:
        assert hits == [0, 6, 6, 6]
    elif not shuffle:
        assert hits == [0, 0, 0, 0], "the least recently used goes shortly before its turn"
    else:
        assert hits[0] == 0 and sum(hits) < 18
