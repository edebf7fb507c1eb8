# SPDX-License-Identifier: Apache-2.0
"""A list of files as a data set, in this process and in those of a loader."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from paceline_plugins.data.cache import Cache, Files
from tests.data.cache.server import Server


def first_byte(path: Path) -> int:
    return path.read_bytes()[0]


def test_urls_and_paths_in_one_list(server: Server, tmp_path: Path) -> None:
    (tmp_path / "here").write_bytes(b"\x07")
    with Cache(tmp_path / "cache") as cache:
        files = Files([server.put("a", b"\x05"), tmp_path / "here"], cache, first_byte)
        assert len(files) == 2 and list(files[i] for i in range(2)) == [5, 7]
        assert Files(files.urls, cache)[0] == b"\x05"


def test_the_default_cache_is_in_the_user_s_directory(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = Files([server.put("a", b"\x05")])
    assert files[0] == b"\x05" and files.cache.directory == tmp_path / "paceline"
    files.cache.close()


def test_a_pickled_cache_opens_the_same_directory(server: Server, tmp_path: Path) -> None:
    url = server.put("a", b"\x05")
    with Cache(tmp_path, 100, threads=2, retries=3, timeout_s=7.0, options={"headers": {"a": "b"}}) as cache:
        cache.read(url)
        with pickle.loads(pickle.dumps(cache)) as other:
            assert other.read(url) == b"\x05" and other.stats()[server.address].hits == 1
            assert other.__getstate__() == cache.__getstate__()
    assert server.requests["a"] == 1


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_in_the_processes_of_a_loader(server: Server, tmp_path: Path, method: str) -> None:
    urls = [server.put(str(i), bytes([i])) for i in range(8)]
    with Cache(tmp_path) as cache:
        with cache.open(urls[0]):  # held by the parent while the children are made
            loader = DataLoader(
                Files(urls, cache, first_byte), batch_size=2, num_workers=2, multiprocessing_context=method
            )
            found = [int(value) for batch in loader for value in batch]
        assert found == list(range(8)) and server.requests == Counter(str(i) for i in range(8))
        assert cache.cached(urls) == set(urls)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_parent_s_files(server: Server, tmp_path: Path) -> None:
    import multiprocessing

    urls = [server.put(str(i), bytes([i])) for i in range(2)]
    fork = multiprocessing.get_context("fork")
    go = fork.Event()
    with Cache(tmp_path, 1, timeout_s=20) as cache:
        with cache.open(urls[0]):
            child = fork.Process(target=go.wait, args=(60,))
            child.start()
        try:
            assert cache.read(urls[1]) == b"\x01"
        finally:
            go.set()
            child.join()
