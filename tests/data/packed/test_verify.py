# SPDX-License-Identifier: Apache-2.0
"""Verify finds every kind of damage."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from paceline_plugins.data.packed import verify
from paceline_plugins.data.packed.index import PackedShard, offsets_to_bytes
from paceline_plugins.data.packed.storage import Storage
from paceline_plugins.data.packed.verify import Report

from .made import index_of, packed


def examine(place: Path | str) -> Report:
    return verify(Storage(str(place)), jobs=2)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def test_an_undamaged_data_set(tmp_path: Path) -> None:
    place = packed(tmp_path)
    told: list[PackedShard] = []
    report = verify(Storage(str(place)), on_shard=told.append)
    assert (report.damaged, report.notes) == ((), ())
    assert report.index == index_of(place)
    assert sorted(told, key=lambda shard: shard.name) == list(report.index.shards)


def test_one_flipped_bit_anywhere_in_a_shard_is_found(tmp_path: Path) -> None:
    place = packed(tmp_path, 4, 4096)
    shard = index_of(place).shards[1]
    for at in range(0, shard.bytes, 97):
        flip(place / shard.name, at)
        (damage,) = examine(place).damaged
        assert damage.shard == shard.name
        assert any("sha256" in fault for fault in damage.faults)
        flip(place / shard.name, at)
    assert examine(place).damaged == ()


def forge(place: Path, number: int, **changes: object) -> None:
    """Write an index with right checksums and other numbers wrong."""
    found = json.loads((place / "index.json").read_text())
    found["shards"][number].update(changes)
    found["samples"] = sum(shard["samples"] for shard in found["shards"])
    (place / "index.json").write_text(json.dumps(found))


def test_offsets_of_another_order_are_found(tmp_path: Path) -> None:
    place = packed(tmp_path)
    shard = index_of(place).shards[0]
    offsets = np.load(place / shard.offsets_name)
    offsets[1] += 512
    raw = offsets_to_bytes(offsets)
    (place / shard.offsets_name).write_bytes(raw)
    forge(place, 0, offsets_sha256=hashlib.sha256(raw).hexdigest())
    (damage,) = examine(place).damaged
    assert f"where {shard.offsets_name} has none" in damage.faults[0]


@pytest.fixture
def remote() -> Iterator[str]:
    """An empty storage in fsspec's memory."""
    import fsspec

    url = f"memory://{uuid.uuid4().hex}"
    yield url
    system = fsspec.filesystem("memory")
    if system.exists(url):
        system.rm(url, recursive=True)


def test_a_remote_data_set(tmp_path: Path, remote: str) -> None:
    import fsspec

    place = packed(tmp_path)
    system = fsspec.filesystem("memory")
    for path in place.iterdir():
        system.pipe_file(f"{remote}/{path.name}", path.read_bytes())
    assert examine(remote).damaged == ()
    shard = index_of(place).shards[0]
    system.pipe_file(f"{remote}/{shard.name}", (place / shard.name).read_bytes()[:-512])
    assert [damage.shard for damage in examine(remote).damaged] == [shard.name]
    system.rm_file(f"{remote}/{shard.name}")
    (damage,) = examine(remote).damaged
    assert f"{remote}/{shard.name} does not exist" in damage.faults[0]


def test_a_wrong_count_is_found(tmp_path: Path) -> None:
    place = packed(tmp_path)
    shard = index_of(place).shards[0]
    raw = offsets_to_bytes(np.delete(np.load(place / shard.offsets_name), 1))
    (place / shard.offsets_name).write_bytes(raw)
    forge(place, 0, samples=shard.samples - 1, offsets_sha256=hashlib.sha256(raw).hexdigest())
    (damage,) = examine(place).damaged
    assert "has a sample at byte" in damage.faults[0]
