# SPDX-License-Identifier: Apache-2.0
"""The choice of a source by path; compressed files; seeds."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline_plugins.data.packed import DataError, open_source, pack
from paceline_plugins.data.packed.packing import Members
from paceline_plugins.data.packed.packing.folder import FolderSource

from ..made import back, by_key, packed

LINES = b"".join(json.dumps({"number": number}).encode() + b"\n" for number in range(50))


def samples(path: Path, seed: int | None = None) -> list[Members]:
    return [task() for task in open_source(str(path)).tasks(seed)]


def zst(raw: bytes) -> bytes:
    zstandard = pytest.importorskip("zstandard")
    half = len(raw) // 2
    frames: list[bytes] = [zstandard.compress(raw[:half]), zstandard.compress(raw[half:])]
    return b"".join(frames)


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress), (".zst", zst)],
)
def test_compressed_files_are_read_and_damaged_ones_named(
    tmp_path: Path, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    path = tmp_path / f"data.jsonl{suffix}"
    raw = compress(LINES)
    path.write_bytes(raw)
    assert [json.loads(sample["json"])["number"] for sample in samples(path)] == list(range(50))
    if suffix:
        for cut in (1, 20, len(raw) // 3):
            path.write_bytes(raw[: len(raw) - cut])
            with pytest.raises(DataError, match=rf"{path.name}: the compressed data are damaged or cut off"):
                samples(path)
        path.write_bytes(b"not compressed at all" * 10)
        with pytest.raises(DataError, match=rf"{path.name}"):
            samples(path)


def test_a_folder_of_files_of_samples_is_read_file_by_file(tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"from": "{name}"}}\n')
    assert [json.loads(sample["json"])["from"] for sample in samples(tmp_path)] == ["a", "b"]
    (tmp_path / "readme.txt").write_text("a folder like any other")
    assert isinstance(open_source(str(tmp_path)), FolderSource)


@pytest.mark.parametrize(
    ("name", "says"),
    [("nothing", "does not exist"), ("picture.jpg", "no source of a known kind"), ("lists", "give one of the .scp")],
)
def test_unknown_kinds_are_refused(tmp_path: Path, name: str, says: str) -> None:
    (tmp_path / "picture.jpg").touch()
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "feats.scp").touch()
    with pytest.raises(DataError, match=says):
        open_source(str(tmp_path / name))


@pytest.mark.parametrize("name", ["a.tar", "a.jsonl.gz", "a.parquet", "a.ark"])
def test_streams_refuse_a_seed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(DataError, match="pack it without --seed, then pack what came out with --seed"):
        samples(tmp_path / name, seed=1)


def test_packed_data_can_be_packed_in_another_order_and_size(tmp_path: Path) -> None:
    first = packed(tmp_path, 30)
    pack(open_source(str(first)), tmp_path / "second", seed=1, shard_bytes=50_000, jobs=2)
    assert by_key(back(tmp_path / "second")) == by_key(back(first))
    assert list(by_key(back(tmp_path / "second"))) != list(by_key(back(first)))


# ---- folders -----------------------------------------------------------------------------------------------------


def test_files_of_a_stem_are_a_sample_and_the_folder_is_its_class(tmp_path: Path) -> None:
    for name in ("cats/1.JPG", "cats/1.txt", "cats/old/2.a.b", "top", "cats/.hidden", "Mr. Cat"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    source = open_source(str(tmp_path))
    found = {json.loads(sample["source.json"])["key"]: sample for sample in (task() for task in source.tasks(None))}
    assert {key: sorted(set(sample) - {"source.json"}) for key, sample in found.items()} == {
        "Mr. Cat": ["bin"],
        "top": ["bin"],
        "cats/1": ["jpg", "txt"],
        "cats/old/2.a": ["b"],
    }
    assert [json.loads(found[key]["source.json"])["class"] for key in ("top", "cats/1", "cats/old/2.a")] == [
        "",
        "cats",
        "cats/old",
    ]
    assert found["cats/1"]["jpg"] == b"cats/1.JPG"
    assert source.progress.notes == ["1 hidden file(s) were left out"]


# ---- lines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1])
def test_the_error_of_an_invalid_line_names_it(tmp_path: Path, seed: int | None) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n\n{"a": }\n')
    with pytest.raises(DataError, match=r"a\.jsonl line 3 is no JSON"):
        samples(tmp_path / "a.jsonl", seed)
