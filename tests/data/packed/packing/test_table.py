# SPDX-License-Identifier: Apache-2.0
"""Packing rows of Parquet: members and JSON."""

from __future__ import annotations

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import pytest

from paceline_plugins.data.packed import DataError, open_source, pack
from paceline_plugins.data.packed.packing.table import sample_of

from ..made import back

JPEG = b"\xff\xd8\xff\xe0 and so on"


def test_bytes_become_members_and_the_rest_one_json() -> None:
    row = {
        "image": JPEG,
        "sound": {"bytes": b"RIFF\0\0\0\0WAVE...", "path": None},
        "photo": {"bytes": b"?", "path": "a/b.PNG"},
        "raw data": b"?",
        "label": 3,
        "when": datetime.date(2026, 1, 2),
        "price": decimal.Decimal("1.50"),
        "missing": None,
        "nested": {"a": [1, 2]},
    }
    found = sample_of(row, "row 0")
    assert {name: data for name, data in found.items() if name != "json"} == {
        "image.jpg": JPEG,
        "sound.wav": b"RIFF\0\0\0\0WAVE...",
        "photo.png": b"?",
        "raw_data.bin": b"?",
    }
    assert json.loads(found["json"]) == {
        "label": 3,
        "when": "2026-01-02",
        "price": "1.50",
        "missing": None,
        "nested": {"a": [1, 2]},
    }


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"a b": b"", "a_b": b""}, "two columns would be the member 'a_b.bin'; rename column 'a_b'"),
        ({"frames": [b"1", b"2"]}, "a bytes inside another value"),
    ],
)
def test_a_row_that_does_not_fit_is_refused(row: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=f"here: {says}"):
        sample_of(row, "here")


def write(path: Path, rows: list[dict[str, Any]], group: int = 7) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=group)


def test_rows_come_back_in_order(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(2):
        rows = [{"image": JPEG + bytes([k]), "label": 100 * number + k} for k in range(100)]
        write(tmp_path / "in" / f"{number}.parquet", rows)
    result = pack(open_source(str(tmp_path / "in")), tmp_path / "out", shard_bytes=20_000)
    assert result.kinds == {"image.jpg + json": 200}
    found = back(tmp_path / "out")
    assert [json.loads(sample["json"])["label"] for sample in found] == list(range(200))
    assert [sample["image.jpg"] for sample in found] == 2 * [JPEG + bytes([k]) for k in range(100)]
