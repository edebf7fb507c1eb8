# SPDX-License-Identifier: Apache-2.0
"""Fetching ahead: what is wished for is there, in its order, and stays until it has been used."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.data.cache import Cache, NotServedError, get
from paceline.data.cache.names import key_of
from paceline.data.cache.prefetch_hints import PrefetchHints
from paceline.data.cache.prefetcher import Prefetcher
from paceline.data.cache.stall_timeout import StallTimeout
from tests.data.cache.server import Server, until

KB = 1000


def urls_of(server: Server, count: int) -> list[str]:
    return [server.put(str(i), bytes([i]) * KB) for i in range(count)]


def test_the_next_file_is_there_before_it_is_asked_for(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 8)
    with Cache(tmp_path) as cache:
        cache.prefetch(urls)
        until(lambda: cache.cached(urls) == set(urls), "not all came")
        for url in urls:
            cache.read(url)
        stats = cache.stats()[server.address]
    assert (stats.hits, stats.misses) == (8, 0) and set(server.requests.values()) == {1}


def test_files_come_in_the_order_of_the_list(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 6)
    wanted = [urls[i] for i in (3, 1, 5, 0, 4, 2)]
    with Cache(tmp_path, threads=1) as cache:
        cache.prefetch(wanted)
        until(lambda: cache.cached(urls) == set(urls), "not all came")
    assert server.arrivals == ["3", "1", "5", "0", "4", "2"]


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
    assert stats.misses == 0 and stats.fetched_bytes == 12 * KB
    assert sum(server.requests.values()) <= 12 + threads - 1, "requests for which there was no room"


def test_what_is_wished_for_later_makes_way_and_comes_back(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 5)
    with Cache(tmp_path, 3 * KB, threads=2) as cache:
        for url in urls[2:]:
            cache.read(url)
        cache.prefetch(urls)
        until(lambda: cache.cached(urls) == set(urls[:3]), "the first three are not there")
        assert server.requests["2"] == 1, "what is wished for next after the first two was there and stays"
        cache.read(urls[0])
        until(lambda: cache.cached(urls) == set(urls[1:4]), "the fourth did not come back")


def test_a_file_that_is_needed_now_pushes_out_the_last_wish(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 4)
    with Cache(tmp_path, 3 * KB, timeout_s=20) as cache:
        cache.prefetch(urls[:3])
        until(lambda: cache.cached(urls) == set(urls[:3]), "not all came")
        with cache.open(urls[3]):
            assert cache.cached(urls) == {urls[0], urls[1], urls[3]}
        until(lambda: urls[2] in cache.cached(urls), "the wish was forgotten")


def test_a_wish_without_room_does_not_keep_its_file_from_whoever_needs_it_now(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 4)
    with Cache(tmp_path, 2 * KB, timeout_s=20) as cache:
        cache.prefetch(urls)
        until(lambda: cache.cached(urls) == set(urls[:2]), "the first two are not there")
        for url in (urls[3], urls[2]):
            assert len(cache.read(url)) == KB


def test_a_new_list_forgets_the_old_one(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 6)
    with Cache(tmp_path, 3 * KB) as cache:
        cache.prefetch(urls[:3])
        until(lambda: cache.cached(urls) == set(urls[:3]), "not all came")
        cache.prefetch(urls[3:])
        until(lambda: cache.cached(urls) == set(urls[3:]), "the old wishes are still in the way")


def test_a_file_asked_for_while_it_is_fetched_is_waited_for(
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


def test_errors_of_the_background_are_met_by_whoever_opens(server: Server, tmp_path: Path) -> None:
    urls = [server.url("none"), *urls_of(server, 3)]
    with Cache(tmp_path) as cache:
        cache.prefetch(urls)
        until(lambda: cache.cached(urls) == set(urls[1:]), "one bad url stopped the others")
        with pytest.raises(NotServedError, match="404"):
            cache.read(urls[0])


def test_a_url_may_come_twice(server: Server, tmp_path: Path) -> None:
    a, b, c = urls_of(server, 3)
    with Cache(tmp_path, 2 * KB, threads=1) as cache:
        cache.prefetch([a, b, a, c])
        for url in (a, b, a, c):
            until(lambda: cache.cached([url]) == {url}, "it did not come")  # noqa: B023
            cache.read(url)
    assert server.requests["0"] == 1, "between its two uses it was wished for"


def test_local_paths_and_no_urls_are_nothing_to_do(tmp_path: Path) -> None:
    with Cache(tmp_path) as cache:
        cache.prefetch([])
        cache.prefetch([str(tmp_path / "file")])
        assert cache.stats() == {}


def test_closing_does_not_wait_for_a_stuck_server(server: Server, tmp_path: Path) -> None:
    urls = urls_of(server, 2)
    server.fail("0", *[503] * 99)
    cache = Cache(tmp_path, threads=1, retries=98)
    cache.prefetch(urls)
    server.wait_for("0")
    cache.close()
    assert not list(tmp_path.glob("*.wishes"))


def test_a_wish_made_while_its_file_is_fetched_for_an_older_list_is_kept(tmp_path: Path) -> None:
    """Else others would not see it, and push the file out."""
    calls: list[int] = []
    begun, go_on = threading.Event(), threading.Event()

    def fetch(url: str, position: int, turn: Callable[[], bool]) -> bool:
        calls.append(position)
        begun.set()
        return go_on.wait(60)

    mine, theirs = PrefetchHints(tmp_path), PrefetchHints(tmp_path)
    prefetcher = Prefetcher(3, mine, fetch, lambda url: 0.0)
    prefetcher.prefetch(["a"])
    assert begun.wait(60)
    prefetcher.prefetch(["b", "a", "c"])
    until(lambda: len(calls) == 3, "nobody passed over the file that is being fetched")
    go_on.set()
    until(lambda: theirs.of_other_processes() == {key_of(url) for url in "abc"}, "the wish was lost")
    prefetcher.close()
    assert sorted(calls) == [0, 0, 1, 2]


def test_a_file_that_is_removed_before_its_fetch_has_ended_is_fetched_again(tmp_path: Path) -> None:
    calls: list[int] = []

    def fetch(url: str, position: int, turn: Callable[[], bool]) -> bool:
        calls.append(position)
        if len(calls) == 1:
            prefetcher.evicted(key_of(url))  # by a thread that needs room for something else now
        return True

    mine, theirs = PrefetchHints(tmp_path), PrefetchHints(tmp_path)
    prefetcher = Prefetcher(1, mine, fetch, lambda url: 0.0)
    prefetcher.prefetch(["a"])
    until(lambda: theirs.of_other_processes() == {key_of("a")}, "nobody noted that it is there")
    prefetcher.close()
    assert calls == [0, 0]


def test_two_caches_of_one_process_leave_each_other_what_they_fetched_ahead(server: Server, tmp_path: Path) -> None:
    mine, theirs = ([server.put(f"{who}{i}", b"x" * KB) for i in range(3)] for who in "ab")
    with Cache(tmp_path, 3 * KB) as cache, Cache(tmp_path, 3 * KB, timeout_s=20) as other:
        cache.prefetch(mine)
        until(lambda: wishes_in(tmp_path) == {key_of(url) for url in mine}, "the first three are not wished for")
        other.prefetch(theirs)
        for url in theirs:
            assert len(other.read(url)) == KB  # what is needed now may push out
        # one, or two where the other is looking at its own last file just then
        assert other.cached(mine), "what the other fetched ahead has pushed all of these out"
    assert sum(server.requests[f"a{i}"] for i in range(3)) == 3


def wishes_in(directory: Path) -> set[str]:
    """What somebody who is new would leave alone."""
    return PrefetchHints(directory).of_other_processes()
