# SPDX-License-Identifier: Apache-2.0
"""Parquet files as a dataset: rows by number, row groups read once."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from paceline.errors import DataError
from paceline_plugins.data import Cache, ParquetDataset

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def write(folder: Path) -> list[dict[str, Any]]:
    """Three files of 10 rows in groups of 4, 4 and 2."""
    rows = [{"number": number, "text": str(number)} for number in range(30)]
    folder.mkdir(parents=True, exist_ok=True)
    for part in range(3):
        table = pyarrow.Table.from_pylist(rows[10 * part : 10 * part + 10])
        parquet.write_table(table, folder / f"part-{part}.parquet", row_group_size=4)
    return rows


def same(batch: list[Any]) -> list[Any]:
    return batch


def test_rows_and_row_groups(tmp_path: Path) -> None:
    rows = write(tmp_path)
    data = ParquetDataset(tmp_path)
    assert len(data) == 30
    assert data.shard_sizes == [4, 4, 2] * 3
    assert list(data.urls) == [str(tmp_path / f"part-{part}.parquet") for part in (0, 0, 0, 1, 1, 1, 2, 2, 2)]
    assert [data[number] for number in range(30)] == rows
    wanted = [29, 3, 0, 17, 3]
    assert data.__getitems__(wanted) == [rows[number] for number in wanted]


def test_a_row_group_is_read_once_and_few_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    data = ParquetDataset(tmp_path)
    reads: list[int] = []
    real = parquet.ParquetFile.read_row_group

    def counted(self: Any, number: int, **more: Any) -> Any:
        reads.append(number)
        return real(self, number, **more)

    monkeypatch.setattr(parquet.ParquetFile, "read_row_group", counted)
    data.__getitems__([0, 5, 1, 6, 2])
    assert reads == [0, 1]
    data.__getitems__([3, 7])
    assert reads == [0, 1]
    data.__getitems__(list(range(30)))
    assert len(reads) == 9
    assert len(data._tables) == 4


@pytest.mark.processes
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_loader_processes_read_the_same(tmp_path: Path, start: str) -> None:
    rows = write(tmp_path)
    data = ParquetDataset(tmp_path)
    assert data[0] == rows[0]
    loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=start, collate_fn=same)
    assert [row for batch in loader for row in batch] == rows


def test_remote_files_by_ranges_or_through_the_cache(tmp_path: Path) -> None:
    import fsspec

    rows = write(tmp_path)
    url = f"memory://{uuid.uuid4().hex}"
    system = fsspec.filesystem("memory")
    urls = [f"{url}/part-{part}.parquet" for part in range(3)]
    for part, name in enumerate(urls):
        system.pipe_file(name, (tmp_path / f"part-{part}.parquet").read_bytes())
    assert ParquetDataset(urls).__getitems__([29, 0]) == [rows[29], rows[0]]
    with Cache(tmp_path / "cache") as cache:
        data = ParquetDataset(urls, cache=cache)
        assert cache.stats() == {}  # footers alone
        assert data.__getitems__([29, 0, 28]) == [rows[29], rows[0], rows[28]]
        assert cache.cached(urls) == {urls[2], urls[0]}
        data.prefetch([15, 0, 16])
        assert data[15] == rows[15]
        assert cache.cached(urls) == set(urls)
    system.rm(url, recursive=True)


def test_a_file_that_is_not_parquet_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no"):
        ParquetDataset(tmp_path)
    with pytest.raises(DataError, match="no Parquet file was given"):
        ParquetDataset([])
    with pytest.raises(DataError, match=r"gone\.parquet does not exist"):
        ParquetDataset(tmp_path / "gone.parquet")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(DataError, match=r"cannot read .*a\.parquet as Parquet"):
        ParquetDataset(tmp_path)
    write(tmp_path / "good")
    with pytest.raises(IndexError, match="row 30 of 30"):
        ParquetDataset(tmp_path / "good")[30]
