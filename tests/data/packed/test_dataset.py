# SPDX-License-Identifier: Apache-2.0
"""Reading packed data: in this process, in loader processes, remotely, and with damaged files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from paceline_plugins.data.packed import DataError, PackedDataset
from paceline_plugins.data.packed.dataset import OPEN_SHARDS, split_sample
from paceline_plugins.data.packed.tar import make_header, padding

from .made import FakeCache, by_key, folder, index_of, packed

URL = "memory://bucket/set"


def text_of(sample: dict[str, bytes]) -> str:
    return sample["txt"].decode()


def same(batch: list[str]) -> list[str]:
    return batch


def test_samples_lengths_and_shards(tmp_path: Path) -> None:
    place = packed(tmp_path, 30)
    data = PackedDataset(place)
    assert len(data) == 30
    assert sum(data.shard_sizes) == 30 and len(data.shard_sizes) > 3
    assert list(data.urls) == [str(place / shard.name) for shard in index_of(place).shards]
    assert by_key(data[number] for number in range(30)) == folder(tmp_path / "again", 30)
    assert [text_of(sample) for sample in PackedDataset(f"file://{place}")] == [text_of(sample) for sample in data]


@pytest.mark.parametrize("index", [-1, 20, 1 << 70])
def test_an_index_out_of_range(tmp_path: Path, index: int) -> None:
    data = PackedDataset(packed(tmp_path))
    with pytest.raises(IndexError, match="which has 20"):
        data[index]
    with pytest.raises(IndexError, match="which has 20"):
        data.__getitems__([0, index])


def test_few_shards_are_kept_open(tmp_path: Path) -> None:
    data = PackedDataset(packed(tmp_path, 3 * OPEN_SHARDS, 4096))
    assert len(data.shard_sizes) > 2 * OPEN_SHARDS
    before = len(os.listdir("/proc/self/fd"))
    for number in range(len(data)):
        data[number]
    assert len(os.listdir("/proc/self/fd")) - before <= OPEN_SHARDS
    assert len(data._open_shards) == OPEN_SHARDS


def test_a_sample_is_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PackedDataset(packed(tmp_path))
    reads: list[tuple[int, int]] = []
    real = os.pread

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        reads.append((count, offset))
        return real(descriptor, count, offset)

    data[7]
    monkeypatch.setattr(os, "pread", pread)
    data[7]
    assert len(reads) == 1
    first = data.shard_sizes[0]
    data.__getitems__([0, first - 1])  # the first shard's offsets are known now
    reads.clear()
    data.__getitems__(list(reversed(range(first))))
    assert len(reads) == 1  # neighbours are one read


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_loader_processes_read_the_same(tmp_path: Path, start: str) -> None:
    data = PackedDataset(packed(tmp_path, 40), decode=text_of)
    here = [data[number] for number in range(40)]  # files are open when the workers are forked
    loader = DataLoader(data, batch_size=5, num_workers=2, multiprocessing_context=start, collate_fn=same)
    assert [text for batch in loader for text in batch] == here


def test_remote_shards_come_through_the_cache(tmp_path: Path) -> None:
    place = packed(tmp_path, 30)
    fake = FakeCache(URL, place)
    data = PackedDataset(URL, decode=text_of, cache=fake)
    assert fake.opened == ["index.json"]
    local = PackedDataset(place, decode=text_of)
    wanted = [29, 0, 29]
    assert data.__getitems__(wanted) == [local[number] for number in wanted]
    first, last = index_of(place).shards[0], index_of(place).shards[-1]
    assert fake.opened[1:] == [last.offsets_name, last.name, first.offsets_name, first.name]
    assert data[0] == local[0]
    assert fake.opened[-1] == first.name  # its offsets are in memory
    assert fake.inside == 0  # nothing stays pinned
    assert list(data.urls) == [f"{URL}/{shard.name}" for shard in index_of(place).shards]


def test_the_error_of_a_truncated_or_missing_shard_names_it(tmp_path: Path) -> None:
    place = packed(tmp_path)
    data = PackedDataset(place)
    shard = index_of(place).shards[0]
    os.truncate(place / shard.name, shard.bytes - 512)
    with pytest.raises(DataError, match=rf"{shard.name} has {shard.bytes - 512} bytes, the index says {shard.bytes}"):
        data[0]
    (place / shard.name).unlink()
    with pytest.raises(DataError, match=rf"{shard.name} does not exist"):
        data[0]
    (place / shard.offsets_name).unlink()
    with pytest.raises(DataError, match=rf"{shard.offsets_name} does not exist"):
        data[0]


def test_a_shard_with_moved_headers_is_refused(tmp_path: Path) -> None:
    place = packed(tmp_path)
    shard = index_of(place).shards[0]
    path = place / shard.name
    raw = path.read_bytes()
    path.write_bytes(raw[512:] + raw[:512])
    with pytest.raises(DataError, match=rf"{shard.name} is damaged at byte 0 \(sample 0\)"):
        PackedDataset(place)[0]


def piece(name: str, data: bytes) -> bytes:
    return make_header(name, len(data)) + data + bytes(padding(len(data)))


def test_only_members_of_the_sample_are_taken() -> None:
    good = piece("000000001.a", b"1") + piece("000000001.b.c", b"22")
    assert split_sample(good, "000000001.") == {"a": b"1", "b.c": b"22"}
    assert split_sample(good, "000000002.") is None
    assert split_sample(good[:-512], "000000001.") is None  # its last data are missing
    assert split_sample(good + piece("000000001.a", b"3"), "000000001.") is None  # twice
    assert split_sample(b"\xff" * 1024, "000000001.") is None
    assert split_sample(bytes(1024), "000000001.") is None
