# SPDX-License-Identifier: Apache-2.0
"""Planning, in cases with known results."""

from __future__ import annotations

import pytest

from paceline_plugins.data.packed.measure import Holding, Speed
from paceline_plugins.data.packed.plan import Need, StoragePlan, judge

MB = 10**6


def holding(file_bytes: int = 100 * MB, files: int = 100, kind: str = "packed", **more: object) -> Holding:
    given = {"bytes": files * file_bytes, "bytes_per_sample": 1e5} | more
    return Holding(kind, tuple((str(k), file_bytes) for k in range(files)), **given)  # type: ignore[arg-type]


def plan(
    need: Need,
    one: float,
    several: float,
    *,
    data: Holding | None = None,
    remote: bool = True,
    first_byte_s: float = 1e-3,
    readers: int = 8,
) -> StoragePlan:
    """Judge speeds in MB/s."""
    speeds = Speed(1, int(one * MB), 1.0, 10), Speed(readers, int(several * MB), 1.0, 10)
    return judge(need, data or holding(), remote, first_byte_s, *speeds)


def test_a_storage_that_is_fast_enough() -> None:
    found = plan(Need(8, 1, 400.0), one=100, several=640)  # needs 8 x 400 x 100 KB = 320 MB/s
    assert found.feeds
    assert found.verdict == "yes: 8 workers would be fed; a host has 640 MB/s and needs 320 MB/s"
    assert found.advice == ()
    (epoch,) = found.epochs
    assert (epoch.need_bytes_s, epoch.have_bytes_s, epoch.waiting, epoch.hits) == (320e6, 640e6, 0.0, 0.0)


def test_hosts_share_the_need_and_the_fullest_counts() -> None:
    need = Need(9, 2, 400.0)
    assert need.workers_a_host == 5
    found = plan(need, one=100, several=250)
    assert found.epochs[0].need_bytes_s == 5 * 400 * 1e5
    assert any("measured from one host" in note and "360 MB/s in all" in note for note in found.notes)


def test_a_cache_of_one_host_helps_from_the_second_epoch_on() -> None:
    found = plan(Need(8, 1, 400.0, cache_bytes=6_000 * MB), one=150, several=160)
    first, later = found.epochs
    assert (first.hits, later.hits) == (0.0, 0.6)  # 6 of 10 GB
    assert later.need_bytes_s == pytest.approx(128e6)
    assert (first.waiting, later.waiting) == (0.5, 0.0)
    assert not found.feeds
    assert "50 % of the time in the first epoch and be fed in later epochs" in found.verdict


def test_the_plan_gives_the_size_of_a_sufficient_cache() -> None:
    found = plan(Need(8, 1, 400.0), one=150, several=160)
    assert "a cache of 6 GB a host, for all epochs but the first" in found.advice  # 1 - 160 / 400 of 10 GB


def test_small_files_need_packing_and_small_shards_should_grow() -> None:
    small = holding(10_000, kind="files")
    found = plan(Need(8, 1, 400.0), 10, 20, data=small)
    assert found.advice[0] == "pack them (paceline data pack): files of 10 KB cost 1 ms each to open"
    shards = holding(4 * MB)
    found = plan(Need(8, 1, 400.0), 40, 80, data=shards, first_byte_s=0.05)  # a shard takes 0.1 s, half of it to begin
    assert found.advice[0] == "larger shards: 50 % of a 4 MB file's time passes before its first byte"
