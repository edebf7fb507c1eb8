# SPDX-License-Identifier: Apache-2.0
"""The original of several copies of a cache adds up their counts, also of killed processes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from paceline_plugins.data.cache import Cache, Files, Stats
from paceline_plugins.data.cache.stats_files import StatsFile
from tests.data.cache.server import Server, until
from tests.data.cache.test_files import first_byte

A, B = "http://a", "s3://b"


def stats_files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("counts/*/*"))


def counted(cache: Cache, source: str) -> tuple[int, int, int]:
    stats = cache.stats()[source]
    return stats.hits, stats.misses, stats.fetched_bytes


def test_copies_are_added_up_and_copies_of_copies(tmp_path: Path) -> None:
    first = StatsFile.of_original(tmp_path)
    one, two = StatsFile.of_copy(tmp_path, first.name), StatsFile.of_copy(tmp_path, first.name)
    below = StatsFile.of_copy(tmp_path, one.name)
    one.write(A, Stats(hits=1, waited_s=0.5))
    one.write(A, Stats(hits=2, waited_s=0.75))  # replaces the earlier record
    two.write(B, Stats(misses=3, fetched_bytes=1 << 40))
    two.write(A, Stats(hits=10))
    below.write(A, Stats(corrupt=7, retries=8))
    assert first.of_copies() == {
        A: Stats(hits=12, waited_s=0.75, retries=8, corrupt=7),
        B: Stats(misses=3, fetched_bytes=1 << 40),
    }
    assert one.of_copies() == {A: Stats(retries=8, corrupt=7)}
    assert two.of_copies() == below.of_copies() == {}
    assert stats_files(tmp_path) == ["0", "0.0", "1"]


def test_the_original_removes_all_files_on_close_and_keeps_the_sum(tmp_path: Path) -> None:
    first, other = StatsFile.of_original(tmp_path), StatsFile.of_original(tmp_path)
    one = StatsFile.of_copy(tmp_path, first.name)
    one.write(A, Stats(hits=3))
    first.close()
    one.write(A, Stats(hits=4))
    assert first.of_copies() == {A: Stats(hits=3)}
    assert other.of_copies() == {}
    assert [path.stem for path in (tmp_path / "counts").iterdir()] == [other.name[0]] * 2
    other.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_processes_of_a_loader_are_in_the_sum(server: Server, tmp_path: Path, method: str) -> None:
    urls = [server.put(str(i), bytes([i]) * 10) for i in range(6)]
    with Cache(tmp_path) as cache:
        cache.read(urls[0])
        loader = DataLoader(Files(urls, cache, first_byte), batch_size=1, num_workers=2, multiprocessing_context=method)
        for epoch in range(1, 3):
            assert len(list(loader)) == 6
            assert counted(cache, server.address) == (6 * epoch - 5, 6, 60)
        assert len(stats_files(tmp_path)) <= 4


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_killed_process_loses_nothing(server: Server, tmp_path: Path) -> None:
    url = server.put("a", b"hello")
    with Cache(tmp_path) as cache:
        cache.read(url)
        pid = os.fork()
        if pid == 0:
            with contextlib.suppress(BaseException):  # the child must not return into the test
                for _ in range(7):
                    cache.read(url)
            signal.alarm(60)
            signal.pause()
        until(lambda: counted(cache, server.address)[0] == 7, "the child has not counted")
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        assert counted(cache, server.address) == (7, 1, 5)
