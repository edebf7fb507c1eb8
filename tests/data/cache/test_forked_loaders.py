# SPDX-License-Identifier: Apache-2.0
"""Object stores in a loader's processes: spawned ones read them, forked ones get an error that says what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from paceline_plugins.data.cache import Cache, Files, NotServedError, obstore_backend
from paceline_plugins.data.cache.obstore_backend import ObstoreBackend

CURES = ("multiprocessing_context='spawn'", "num_workers=0", "options={'backend': 'fsspec'}")
URLS = ["s3://bucket/dir/a b.bin", "s3://bucket/100%?#.bin", "s3://bucket/signed"]


def same(batch: list[Any]) -> list[Any]:
    return batch


class ReadOrError:
    """A data set whose sample is an object or the error of reading it."""

    def __init__(self, cache: Cache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        try:
            return self.cache.read(URLS[1]).decode()
        except NotServedError as error:
            return str(error)


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_is_refused_what_it_misses_and_reads_what_is_there(s3: dict[str, str], tmp_path: Path) -> None:
    with Cache(tmp_path, options=s3) as cache:
        assert cache.read(URLS[0]) == b"hello"
        loader = DataLoader(ReadOrError(cache), num_workers=1, multiprocessing_context="fork", collate_fn=same)
        ((said,),) = list(loader)
        assert "s3://bucket/100%" in said and all(cure in said for cure in CURES)
        there = Files(URLS[:1], cache, Path.read_bytes)
        assert list(DataLoader(there, num_workers=1, multiprocessing_context="fork", collate_fn=same)) == [[b"hello"]]
        assert cache.read(URLS[1]) == b"percent", "its parent still reads"


@pytest.mark.slow  # forked ones do
@pytest.mark.processes
def test_spawned_processes_read_what_their_parent_read(s3: dict[str, str], tmp_path: Path) -> None:
    with Cache(tmp_path / "cache", 40_000, options=s3) as cache:
        assert cache.read(URLS[0]) == b"hello"
        files = Files(URLS[:2], cache, Path.read_bytes)
        loader = DataLoader(files, num_workers=2, multiprocessing_context="spawn", collate_fn=same)
        assert list(loader) == [[b"hello"], [b"percent"]]


def test_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("obstore")
    monkeypatch.setattr(obstore_backend, "_obstore_lost_in_fork", True)
    for cure in CURES:
        with pytest.raises(NotServedError, match=re.escape(cure)):
            ObstoreBackend("s3://bucket", {}, 1.0)


def test_options_that_the_store_does_not_know(s3: dict[str, str]) -> None:
    with pytest.raises(NotServedError, match=r"the options of this store: .*no_such_option"):
        ObstoreBackend("s3://bucket", {**s3, "no_such_option": "x"}, 60.0)
