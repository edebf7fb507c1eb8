# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that somebody has prepared: refused with a clear error, and nothing in them is ever executed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.checkpoint.files import own_sum, sha256
from paceline.errors import CheckpointError
from tests.helpers import Program, adam, simulate, train

RULE = "bmuf(period=2)"


class Bomb:
    """What happens when it is unpickled can be seen."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._canary),)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints") / "whole"
    train(RULE, 2, optimizer=adam, save_at=4, save_to=path, stop_at=4)
    return path


@pytest.fixture
def prepared(whole: Path, tmp_path: Path) -> Path:
    """A copy that somebody else can write to."""
    return Path(shutil.copytree(whole, tmp_path / "prepared"))


def resume(path: Path, workers: int = 2) -> Any:
    return simulate(Program(RULE, optimizer=adam, resume=path, stop_at=6), workers)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """With a sum of its own that fits."""
    (path / "manifest.json").write_text(json.dumps({**manifest, "sum": own_sum(manifest)}))


def put(path: Path, name: str, data: bytes) -> None:
    """Replace a file, and its sum in the manifest: whoever can do the one can do the other."""
    (path / name).write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = sha256(path / name)
    write_manifest(path, manifest)


def change(path: Path, **values: Any) -> None:
    """Write other values into the manifest."""
    manifest = json.loads((path / "manifest.json").read_text())
    write_manifest(path, manifest | values)


def poison(canary: Path, torch_made: bool, path: Path) -> bytes:
    if not torch_made:
        return pickle.dumps(Bomb(canary))
    torch.save({"model": Bomb(canary)}, path / "made.pt")
    data = (path / "made.pt").read_bytes()
    (path / "made.pt").unlink()
    return data


@pytest.mark.parametrize("torch_made", [False, True])
@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("rank-000.safetensors", 2),
        ("rank-000.json", 2),
        ("rank-000.safetensors", 3),
        ("rank-000.json", 1),
        ("global.safetensors", 1),
        ("global.safetensors", 3),
    ],
)
def test_a_pickle_under_the_name_of_a_file(
    name: str, workers: int, torch_made: bool, prepared: Path, tmp_path: Path
) -> None:
    """Also on another number of workers, where the files are read in another way."""
    put(prepared, name, poison(tmp_path / "canary", torch_made, tmp_path))
    with pytest.raises(CheckpointError, match=r"is no (JSON|safetensors file)|cannot be resumed"):
        resume(prepared, workers)
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "rank-000.json/../x", "a\0b"])
def test_a_manifest_that_names_what_is_elsewhere(name: str, prepared: Path) -> None:
    files = json.loads((prepared / "manifest.json").read_text())["files"]
    change(prepared, files={**files, name: "0" * 64})
    with pytest.raises(CheckpointError, match="which is no file of a checkpoint"):
        resume(prepared)


@pytest.mark.parametrize("size", [0, -1, 10**12, 1 << 70, "2", 1.5, None])
def test_absurd_numbers_of_workers(size: object, prepared: Path) -> None:
    change(prepared, size=size)
    with pytest.raises(CheckpointError, match=r"its number of workers is|which are not those of"):
        resume(prepared)


@pytest.mark.parametrize(
    "data",
    [
        struct.pack("<Q", 1 << 63) + b"{}",
        struct.pack("<Q", 99_999_999) + b"{}",
        struct.pack("<Q", 70) + b'{"a":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,8]}}'.ljust(70),
        b"",
    ],
)
def test_absurd_sizes_of_tensors(data: bytes, prepared: Path) -> None:
    put(prepared, "rank-000.safetensors", data)
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        resume(prepared)


@pytest.mark.parametrize(
    "text", ["[" * 200_000, '{"paceline.dtype": "_inductor"}', '{"paceline.none": 1}', '{"model": 1']
)
def test_json_that_no_state_is(text: str, prepared: Path) -> None:
    put(prepared, "rank-001.json", text.encode())
    with pytest.raises(CheckpointError, match=r"is no JSON|the checkpoint (names|holds)"):
        resume(prepared)


def test_a_manifest_without_end(prepared: Path) -> None:
    with (prepared / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # of which the disk holds nothing
    with pytest.raises(CheckpointError, match="has more than 67108864 bytes"):
        resume(prepared)


@pytest.mark.parametrize("name", ["manifest.json", "rank-001.json", "rank-000.safetensors"])
def test_links_lead_nowhere(name: str, prepared: Path, tmp_path: Path) -> None:
    """Also where what is behind them is right: who reads a file through one may read anything."""
    (prepared / name).rename(tmp_path / "elsewhere")
    (prepared / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="is a link"):
        resume(prepared)


def test_a_pickle_as_manifest(prepared: Path, tmp_path: Path) -> None:
    (prepared / "manifest.json").write_bytes(poison(tmp_path / "canary", False, tmp_path))
    with pytest.raises(CheckpointError, match=r"manifest\.json is damaged"):
        resume(prepared)
    assert not (tmp_path / "canary").exists()
