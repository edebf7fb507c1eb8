# SPDX-License-Identifier: Apache-2.0
"""A directory shared by real processes, some of which are killed."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline_plugins.data.cache import Cache
from paceline_plugins.data.cache.names import key_of
from tests.data.cache.programs import Worker
from tests.data.cache.server import Server
from tests.data.cache.test_cache import bytes_in
from tests.data.cache.test_prefetcher import hints_in
from tests.waiting import until

pytestmark = pytest.mark.processes
KB = 1000


def start(
    stack: ExitStack, count: int, work: str, directory: Path, cap: int | None, *arguments: object
) -> list[Worker]:
    """Processes that wait for `go`."""
    workers = [stack.enter_context(Worker(work, directory, cap, *arguments)) for _ in range(count)]
    for worker in workers:
        worker.wait_ready()
    return workers


def test_one_download_a_host(server: Server, tmp_path: Path) -> None:
    url = server.put("a", b"x" * 100_000)
    server.fail("a", "hold")
    with ExitStack() as stack:
        workers = start(stack, 3, "read_all", tmp_path, None, [url])
        for worker in workers:
            worker.go()
        server.wait_half()
        server.resume.set()
        found = [worker.result() for worker in workers]
    assert server.requests["a"] == 1
    assert [f["sizes"] for f in found] == [[100_000]] * 3
    assert sorted(f["fetched"] for f in found) == [0, 0, 100_000]


def test_a_waiting_process_takes_over_the_download_of_a_killed_one(server: Server, tmp_path: Path) -> None:
    url = server.put("a", b"x" * 5 * KB)
    server.fail("a", "hold")
    with ExitStack() as stack:
        (worker,) = start(stack, 1, "read_all", tmp_path, None, [url])
        worker.go()
        server.wait_half()
        with Cache(tmp_path, timeout_s=20) as cache:
            found: list[bytes] = []
            waiting = threading.Thread(target=lambda: found.append(cache.read(url)))
            waiting.start()
            worker.kill()
            waiting.join(30)
            assert found == [b"x" * 5 * KB]


@pytest.mark.slow
def test_a_file_open_in_another_process_stays_until_that_is_killed(server: Server, tmp_path: Path) -> None:
    urls = [server.put(str(i), b"x" * KB) for i in range(3)]
    with ExitStack() as stack:
        (worker,) = start(stack, 1, "hold", tmp_path, 2 * KB, urls[0])
        worker.go()
        assert worker.process.stdout is not None and worker.process.stdout.readline() == "held\n"
        with Cache(tmp_path, 2 * KB, timeout_s=20) as cache:
            cache.read(urls[1])
            cache.read(urls[2])
            assert cache.cached(urls) == {urls[0], urls[2]}
            worker.kill()
            cache.read(urls[1])
            assert cache.cached(urls) == {urls[1], urls[2]}


@pytest.mark.slow
def test_the_cap_holds_for_all_processes_together(server: Server, tmp_path: Path) -> None:
    urls = [server.put(str(i), b"x" * KB) for i in range(12)]
    peak = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, bytes_in(tmp_path))

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ExitStack() as stack:
        workers = start(stack, 3, "prefetch", tmp_path, 5 * KB, urls)
        for worker in workers:
            worker.go()
        found = [worker.result() for worker in workers]
    done.set()
    watcher.join()
    assert [f["sizes"] for f in found] == [[KB] * 12] * 3
    assert KB <= peak <= 5 * KB and bytes_in(tmp_path) <= 5 * KB


@pytest.mark.slow
def test_processes_keep_each_other_s_prefetched_files(server: Server, tmp_path: Path) -> None:
    mine, theirs = ([server.put(f"{who}{i}", b"x" * KB) for i in range(3)] for who in "ab")
    with Cache(tmp_path, 3 * KB) as cache:
        cache.prefetch(mine)
        server.wait_for("a2")
        for url in mine:
            with cache.open(url):  # waits for the download
                pass
        cache.prefetch(mine)
        until(lambda: hints_in(tmp_path) == {key_of(url) for url in mine}, "a hint was lost")
        with ExitStack() as stack:
            (worker,) = start(stack, 1, "prefetch", tmp_path, 3 * KB, theirs)
            worker.go()
            assert worker.result()["sizes"] == [KB] * 3  # an opened file may evict
        # one, or two while the other process fetches its own last file
        assert cache.cached(mine), "prefetching of the other process has evicted all of these"
