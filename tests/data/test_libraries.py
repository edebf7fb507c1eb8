# SPDX-License-Identifier: Apache-2.0
"""The data sets of Hugging Face, with the real library: every sample once under every kind of rule."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.data import ShardStream, hugging_face
from tests.data.test_streams import Program, uneven

SIZES = [9, 4, 13, 7]
RULES = ["sync", "bmuf(period=2)", "asgd()"]


def everything() -> list[int]:
    return [100 * s + i for s, size in enumerate(SIZES) for i in range(size)]


def check(make: Callable[[int], Any], rule: str, workers: int, processes: int, want: list[int] | None = None) -> None:
    """Every sample once an epoch."""
    results = paceline.simulate(Program(rule, lambda: make(processes)), workers, clock=uneven())
    for epoch in range(2):
        seen = sorted(i for found, _ in results for batch in found[epoch] for i in batch)
        assert seen == (everything() if want is None else want)


def check_resume(make: Callable[[int], Any], folder: Path, want: list[int] | None = None) -> None:
    """Stopped in the first epoch, and again on another number of workers."""
    first = paceline.simulate(Program("sync", lambda: make(0), stop=2, to=folder / "c"), 2)
    again = [
        paceline.simulate(Program("sync", lambda: make(0), resume=folder / "c"), 2),
        paceline.simulate(Program("sync", lambda: make(0), states=[state for _, state in first]), 3),
    ]
    for second in again:
        seen = sorted(i for found, _ in [*first, *second] for batch in found[0] for i in batch)
        assert seen == (everything() if want is None else want)


# -- Hugging Face ----------------------------------------------------------------------------------


def _n(rows: list[dict[str, Any]]) -> Any:
    return torch.tensor([int(row["n"]) for row in rows])


def _numbered(s: int, size: int) -> list[dict[str, int]]:
    return [{"n": 100 * s + i} for i in range(size)]


def _rows(shards: list[int]) -> Any:
    for s in shards:
        yield from _numbered(s, SIZES[s])


def hugging_face_loader(processes: int) -> Any:
    datasets = pytest.importorskip("datasets")
    data = datasets.IterableDataset.from_generator(_rows, gen_kwargs={"shards": list(range(len(SIZES)))})
    stream = ShardStream(hugging_face(data.map(dict).with_format("torch")))
    return DataLoader(stream, 4, num_workers=processes, collate_fn=_n)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("processes", [0, 2])
def test_hugging_face_streams(rule: str, processes: int) -> None:
    check(hugging_face_loader, rule, 2, processes)


@pytest.mark.processes
def test_hugging_face_streams_resume(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    check_resume(hugging_face_loader, tmp_path)


def test_hugging_face_files_are_shards(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    paths = []
    for s, size in enumerate(SIZES):
        paths.append(str(tmp_path / f"{s}.jsonl"))
        Path(paths[-1]).write_text("".join(json.dumps(row) + "\n" for row in _numbered(s, size)), encoding="utf-8")
    data = datasets.load_dataset(
        "json", data_files=paths, streaming=True, split="train", cache_dir=str(tmp_path / "cache")
    )
    shards = hugging_face(data)
    assert len(shards) == len(SIZES)
    assert [[row["n"] for row in shards.read(s, 3)] for s in range(4)] == [
        list(range(100 * s + 3, 100 * s + size)) for s, size in enumerate(SIZES)
    ]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("processes", [0, 2])
def test_hugging_face_data_with_an_index(rule: str, processes: int, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")

    def make(count: int) -> Any:
        data = datasets.Dataset.from_dict({"n": list(range(33))}).with_format("torch")
        return DataLoader(data, 4, shuffle=True, num_workers=count, collate_fn=_n)

    check(make, rule, 2, processes, list(range(33)))
    if not processes:
        check_resume(make, tmp_path, list(range(33)))


def test_what_is_no_stream_is_refused() -> None:
    with pytest.raises(paceline.UnsupportedError, match="list is no Hugging Face IterableDataset"):
        hugging_face([1, 2])
    datasets = pytest.importorskip("datasets")
    with pytest.raises(paceline.UnsupportedError, match="put a Dataset into a DataLoader as it is"):
        hugging_face(datasets.Dataset.from_dict({"n": [1]}))
