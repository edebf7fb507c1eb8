# SPDX-License-Identifier: Apache-2.0
"""Prefetching: files arrive in the order of the list, and stay until they have been opened."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline_plugins.data.cache import Cache, get
from paceline_plugins.data.cache.locks import StallTimeout
from paceline_plugins.data.cache.names import key_of
from paceline_plugins.data.cache.prefetch_hints import PrefetchHints
from paceline_plugins.data.cache.prefetcher import Prefetcher
from tests.data.cache.server import Server
from tests.waiting import until

KB = 1000


def urls_of(server: Server, count: int) -> list[str]:
    return [server.put(str(i), bytes([i]) * KB) for i in range(count)]


def test_prefetched_files_are_hits(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 8)
    with Cache(tmp_path) as cache:
        cache.prefetch(urls)
        until(lambda: cache.cached(urls) == set(urls), "not all arrived")
        for url in urls:
            cache.read(url)
        stats = cache.stats()[server.address]
    assert (stats.hits, stats.misses) == (8, 0) and set(server.requests.values()) == {1}


@pytest.mark.parametrize("threads", [1, 4])
def test_under_a_cap_each_file_is_fetched_once_if_it_is_used_in_order(
    server: Server, tmp_path: Path, threads: int
) -> None:
    urls = urls_of(server, 12)
    with Cache(tmp_path, 3 * KB, threads=threads) as cache:
        cache.prefetch(urls)
        for number, url in enumerate(urls):
            until(lambda: set(urls[number : number + 3]) <= cache.cached(urls), "the next three did not come")  # noqa: B023
            with cache.open(url) as path:
                assert path.read_bytes() == bytes([number]) * KB
        stats = cache.stats()[server.address]
    assert stats.fetched_bytes == 12 * KB
    assert sum(server.requests.values()) <= 12 + threads - 1, "requests for which there was no room"


def test_later_files_are_evicted_for_earlier_ones_and_fetched_again(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 5)
    with Cache(tmp_path, 3 * KB, threads=2) as cache:
        for url in urls[2:]:
            cache.read(url)
        cache.prefetch(urls)
        until(lambda: cache.cached(urls) == set(urls[:3]), "the first three are not there")
        assert server.requests["2"] == 1, "the third file was there and stays"
        cache.read(urls[0])
        until(lambda: cache.cached(urls) == set(urls[1:4]), "the fourth did not come back")


def test_a_file_waiting_for_room_can_be_opened(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 4)
    with Cache(tmp_path, 2 * KB, timeout_s=20) as cache:
        cache.prefetch(urls)
        until(lambda: cache.cached(urls) == set(urls[:2]), "the first two are not there")
        for url in (urls[3], urls[2]):
            assert len(cache.read(url)) == KB


def test_a_file_of_a_likely_size_does_not_wait_for_the_answer_to_an_earlier_one(server: Server, tmp_path: Path) -> None:
    first, late, later = urls_of(server, 3)
    server.fail("1", "late")
    with Cache(tmp_path, 3 * KB, threads=2) as cache:
        cache.prefetch([first])
        until(lambda: cache.cached([first]) == {first}, "the first did not arrive")
        cache.prefetch([first, late, later])
        until(lambda: cache.cached([later]) == {later}, "the last waits for one whose answer is late")
        assert cache.cached([late]) == set()
        server.resume.set()
        assert cache.read(late) == bytes([1]) * KB


def test_opening_a_file_waits_for_its_running_download(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (url,) = urls_of(server, 1)

    class Noticed(StallTimeout):
        def wait(self) -> None:
            server.resume.set()
            super().wait()

    monkeypatch.setattr(get, "StallTimeout", Noticed)
    server.fail("0", "hold")
    with Cache(tmp_path) as cache:
        cache.prefetch([url])
        server.wait_half()
        assert cache.read(url) == bytes(KB)
        stats = cache.stats()[server.address]
    assert (stats.misses, server.requests["0"]) == (1, 1) and stats.waited_s > 0


def test_closing_does_not_wait_for_a_stuck_server(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 2)
    server.fail("0", *[503] * 99)
    cache = Cache(tmp_path, threads=1, retries=98)
    cache.prefetch(urls)
    server.wait_for("0")
    cache.close()
    assert not list(tmp_path.glob("*.wishes"))


def test_a_file_being_fetched_for_an_older_list_gets_a_hint(tmp_path: Path) -> None:
    """Otherwise other processes would evict it."""
    calls: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def fetch(url: str, position: int, turn: Callable[[], bool]) -> bool:
        calls.append(position)
        begun.set()
        return go_on.wait(60)

    own, other = PrefetchHints(tmp_path), PrefetchHints(tmp_path)
    prefetcher = Prefetcher(3, own, fetch, lambda url: 0.0)
    prefetcher.prefetch(["a"])
    assert begun.wait(60)
    prefetcher.prefetch(["b", "a", "c"])
    until(lambda: len(calls) == 3, "the file that is being fetched was not skipped")
    go_on.set()
    until(lambda: other.of_other_processes() == {key_of(url) for url in "abc"}, "the hint was lost")
    prefetcher.close()
    assert sorted(calls) == [0, 0, 1, 2]


def hints_in(directory: Path) -> set[str]:
    """The hints that a new process sees."""
    return PrefetchHints(directory).of_other_processes()
