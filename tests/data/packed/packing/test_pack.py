# SPDX-License-Identifier: Apache-2.0
"""Packing: each sample once, shards within their size, all or nothing, and other tools read them."""

from __future__ import annotations

import gc
import hashlib
import json
import socket
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from paceline_plugins.data.packed import DataError, open_source, pack
from paceline_plugins.data.packed.packing import Members, SourceProgress, Task
from paceline_plugins.data.packed.packing.pack import PackProgress, partial_directory

from ..made import back, by_key, folder, index_of


class Given:
    """A source of given tasks."""

    def __init__(self, tasks: list[Task]) -> None:
        self.progress = SourceProgress()
        self._tasks = tasks

    def tasks(self, seed: int | None) -> Iterator[Task]:
        yield from self._tasks


def given(*samples: Members) -> Given:
    def task(sample: Members) -> Callable[[], Members]:
        return lambda: sample

    return Given([task(sample) for sample in samples])


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("seed", [None, 7])
def test_every_sample_once_in_shards_within_the_given_size(tmp_path: Path, jobs: int, seed: int | None) -> None:
    made = folder(tmp_path / "in", 40)
    result = pack(open_source(str(tmp_path / "in")), tmp_path / "out", shard_bytes=12_000, seed=seed, jobs=jobs)
    assert by_key(back(tmp_path / "out")) == made
    assert result.index == index_of(tmp_path / "out")
    assert len(result.index.shards) > 3
    assert result.kinds == {"jpg + source.json + txt": 40}
    for shard in result.index.shards:
        raw = (tmp_path / "out" / shard.name).read_bytes()
        assert len(raw) == shard.bytes <= 12_000
        assert hashlib.sha256(raw).hexdigest() == shard.sha256
    assert not (tmp_path / "out.partial").exists()


def test_a_seed_is_an_order(tmp_path: Path) -> None:
    folder(tmp_path / "in", 40)
    orders = []
    for number, seed in enumerate([None, 1, 1, 2]):
        pack(open_source(str(tmp_path / "in")), tmp_path / str(number), seed=seed)
        orders.append(list(by_key(back(tmp_path / str(number)))))
    assert orders[0] == sorted(orders[0])
    assert orders[1] == orders[2]
    assert len({tuple(order) for order in orders}) == 3


def test_tarfile_reads_the_shards(tmp_path: Path) -> None:
    made = folder(tmp_path / "in", 10)
    pack(open_source(str(tmp_path / "in")), tmp_path / "out", shard_bytes=12_000)
    found = []
    for shard in index_of(tmp_path / "out").shards:
        with tarfile.open(tmp_path / "out" / shard.name, "r:") as tar:
            for member in tar:
                file = tar.extractfile(member)
                assert file is not None
                found.append((member.name, file.read()))
    texts = [data for name, data in found if name.endswith(".txt")]
    assert sorted(texts) == sorted(sample["txt"] for sample in made.values())
    assert [name for name, _ in found[:4]] == [
        "000000000.jpg",
        "000000000.txt",
        "000000000.source.json",
        "000000001.jpg",
    ]


@pytest.mark.filterwarnings("ignore")  # of another library
def test_webdataset_reads_the_shards(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    made = folder(tmp_path / "in", 30)
    pack(open_source(str(tmp_path / "in")), tmp_path / "out", shard_bytes=12_000)
    urls = [str(tmp_path / "out" / shard.name) for shard in index_of(tmp_path / "out").shards]
    found = list(webdataset.WebDataset(urls, shardshuffle=False))
    assert [sample["__key__"] for sample in found] == [f"{number:09d}" for number in range(30)]
    assert by_key({k: v for k, v in s.items() if not k.startswith("__")} for s in found) == made
    gc.collect()  # closes its open files, so that no other test warns


def test_a_sample_larger_than_a_shard_has_one_of_its_own(tmp_path: Path) -> None:
    pack(given({"a": b"1"}, {"a": bytes(10_000)}, {"a": b"3"}), tmp_path / "out", shard_bytes=4096)
    assert [(s.samples, s.bytes) for s in index_of(tmp_path / "out").shards] == [
        (1, 2048),
        (1, 512 + 10_240 + 1024),
        (1, 2048),
    ]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_failed_pack_leaves_no_files(tmp_path: Path, jobs: int) -> None:
    def broken() -> Members:
        raise DataError("in/7.jpg is damaged")

    tasks: list[Task] = [lambda: {"a": b"1"}] * 10
    with pytest.raises(DataError, match=r"in/7.jpg"):
        pack(Given([*tasks, broken, *tasks]), tmp_path / "out", jobs=jobs)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(DataError, match=r"out.partial: No space left on device"):
        pack(given({"a": b"1"}), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sample", "says"),
    [({}, "has no member"), ({"a/b": b""}, "'a/b'"), ({"": b""}, "''"), ({"a..b": b""}, "'a..b'"), ({"é": b""}, "'é'")],
)
def test_a_sample_that_a_shard_cannot_hold_is_refused(tmp_path: Path, sample: Members, says: str) -> None:
    with pytest.raises(DataError, match=f"sample 0.*{says}"):
        pack(given(sample), tmp_path / "out")


def test_few_samples_are_in_memory(tmp_path: Path) -> None:
    """A task is started only when no more than 2 jobs samples wait."""
    lock, started, written = threading.Lock(), 0, 0
    most = 0

    def task() -> Members:
        nonlocal started, most
        with lock:
            started += 1
            most = max(most, started - written)
        return {"a": b"1"}

    def told(done: PackProgress) -> None:
        nonlocal written
        written = done.samples

    pack(Given([task] * 200), tmp_path / "out", jobs=3, on_sample=told)
    assert started == 200
    assert most <= 2 * 3


def killed(tmp_path: Path, host: str) -> Path:
    """The files of a pack that was killed with SIGKILL."""
    left = tmp_path / "out.partial"
    left.mkdir()
    (left / "shard-00000.tar").write_bytes(b"half")
    (tmp_path / "out.partial.lock").write_text(json.dumps({"host": host, "process": 1}))
    return left


@pytest.mark.parametrize(
    ("host", "strange", "says"),
    [("elsewhere", "", "on elsewhere"), ("", "", "by an earlier"), ("here", "mine.txt", "mine.txt")],
)
def test_files_that_may_belong_to_another_pack_stay(tmp_path: Path, host: str, strange: str, says: str) -> None:
    left = killed(tmp_path, socket.gethostname() if host == "here" else host)
    (left / (strange or "index.json")).touch()
    for _ in range(2):  # the second time as well
        with pytest.raises(DataError, match=says):
            pack(given({"a": b"1"}), tmp_path / "out")
    assert (left / "shard-00000.tar").read_bytes() == b"half"


def test_two_packs_at_once_are_refused(tmp_path: Path) -> None:
    with partial_directory(tmp_path / "out"):
        with pytest.raises(DataError, match="another pack is at work"):
            pack(given({"a": b"1"}), tmp_path / "out")
    pack(given({"a": b"1"}), tmp_path / "out")


def test_a_link_to_leftovers_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "shard-00000.tar").touch()
    (tmp_path / "out.partial").symlink_to(tmp_path / "theirs")
    (tmp_path / "out.partial.lock").write_text(json.dumps({"host": socket.gethostname()}))
    with pytest.raises(DataError, match="a link or a file"):
        pack(given({"a": b"1"}), tmp_path / "out")
    assert (tmp_path / "theirs" / "shard-00000.tar").exists()


def test_existing_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError, match=r"out exists already"):
        pack(given({"a": b"1"}), tmp_path / "out")
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "shard-00000.tar").write_bytes(b"of another user")
    with pytest.raises(DataError, match=r"by an earlier paceline, or not by a pack.*remove it when no pack runs"):
        pack(given({"a": b"1"}), tmp_path / "other")
    assert (tmp_path / "other.partial" / "shard-00000.tar").read_bytes() == b"of another user"
