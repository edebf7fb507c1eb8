# SPDX-License-Identifier: Apache-2.0
"""Files as shards: what is read, from anywhere, and what is said of files that are not as they should be."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

import paceline
from paceline.data import Shards, ShardStream, json_lines, parquet_rows, text_lines
from tests.data.test_streams import Program, uneven


def number_files(folder: Path, sizes: list[int]) -> list[Path]:
    """JSON lines; sample i of file s is 100 s + i."""
    paths = [folder / f"{s}.jsonl" for s in range(len(sizes))]
    for s, size in enumerate(sizes):
        paths[s].write_text("".join(json.dumps(100 * s + i) + "\n" for i in range(size)), encoding="utf-8")
    return paths


def check(shards: Shards, want: list[list[Any]]) -> None:
    """Everything, from every sample on."""
    assert len(shards) == len(want)
    for shard, samples in enumerate(want):
        for skip in range(len(samples) + 2):
            assert list(shards.read(shard, skip)) == samples[skip:]


def test_what_is_no_json_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{"a"\n', encoding="utf-8")
    samples = json_lines([path]).read(0, 0)
    assert next(samples) == {"a": 1}
    with pytest.raises(ValueError, match=r"line 2 of .*a\.jsonl is no JSON"):
        next(samples)


@pytest.mark.parametrize("make", [text_lines, json_lines])
def test_lists_that_make_no_sense(make: Callable[[Any], Any], tmp_path: Path) -> None:
    (there,) = number_files(tmp_path, [1])
    with pytest.raises(ValueError, match=r"1 of 2 files are not there, the first is .*nowhere"):
        make([there, tmp_path / "nowhere"])
    with pytest.raises(ValueError, match="is in the list twice"):
        make([there, str(there)])
    with pytest.raises(ValueError, match="is one name"):
        make(str(there))


@pytest.mark.parametrize("rule", ["sync", "bmuf(period=2)", "asgd()"])
@pytest.mark.parametrize("processes", [0, 2])
def test_files_are_shared(rule: str, processes: int, tmp_path: Path) -> None:
    paths = number_files(tmp_path, [9, 4, 0, 13, 7])
    results = paceline.simulate(
        Program(rule, lambda: DataLoader(ShardStream(json_lines(paths)), 4, num_workers=processes)), 2, clock=uneven()
    )
    for epoch in range(2):
        seen = sorted(i for found, _ in results for batch in found[epoch] for i in batch)
        assert seen == [100 * s + i for s, size in enumerate([9, 4, 0, 13, 7]) for i in range(size)]


def test_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    want = [[{"n": 100 * s + i, "t": f"x{i}"} for i in range(size)] for s, size in enumerate([7, 1, 0])]
    schema = pyarrow.schema([("n", pyarrow.int64()), ("t", pyarrow.string())])
    paths = [tmp_path / f"{s}.parquet" for s in range(3)]
    for path, rows in zip(paths, want, strict=True):
        parquet.write_table(pyarrow.Table.from_pylist(rows, schema), path, row_group_size=3)
    check(parquet_rows(paths), want)
    check(parquet_rows(paths, ["n"]), [[{"n": row["n"]} for row in rows] for rows in want])
    with pytest.raises(ValueError, match="has no column z; it has n, t"):
        next(parquet_rows(paths, ["n", "z"]).read(0, 0))

    loader: Callable[[], Any] = lambda: DataLoader(ShardStream(parquet_rows(paths)), 2, collate_fn=_numbers)  # noqa: E731
    results = paceline.simulate(Program("asgd()", loader), 2)
    seen = sorted(i for found, _ in results for batch in found[1] for i in batch)
    assert seen == [*range(7), 100]


def _numbers(rows: list[dict[str, Any]]) -> Any:
    import torch

    return torch.tensor([row["n"] for row in rows])


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    with pytest.raises(paceline.UnsupportedError, match=r"paceline\[parquet\]"):
        parquet_rows(number_files(tmp_path, [1]))
