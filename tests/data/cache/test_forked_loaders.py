# SPDX-License-Identifier: Apache-2.0
"""Object stores in a loader's processes: spawned ones read them, forked ones get an error that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from paceline_plugins.data.cache import Cache, Files, NotServedError
from paceline_plugins.data.packed import PackedDataset
from tests.data.packed.made import packed

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


@pytest.mark.processes
def test_spawned_processes_read_what_their_parent_read(s3: dict[str, str], tmp_path: Path) -> None:
    import boto3

    folder = packed(tmp_path)
    client = boto3.client(
        "s3", endpoint_url=s3["endpoint"], region_name="us-east-1", aws_access_key_id="a", aws_secret_access_key="b"
    )
    for path in folder.iterdir():
        client.put_object(Bucket="bucket", Key=f"set/{path.name}", Body=path.read_bytes())
    client.close()
    with Cache(tmp_path / "cache", 40_000, options=s3) as cache:
        data = PackedDataset("s3://bucket/set", cache=cache)
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="spawn", collate_fn=same)
        assert [sample for batch in loader for sample in batch] == list(PackedDataset(folder))
