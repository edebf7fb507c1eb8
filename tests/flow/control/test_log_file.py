# SPDX-License-Identifier: Apache-2.0
"""The file of the control plane's record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import CheckpointError
from paceline.flow.control import log_file

STATE = {"exchange": 12, "gone": [[3, "it was silent for 0.8 s"]], "waited": 0.125, "books": {"saved": {"a": [1, 2]}}}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert log_file.read(path) is None
    log_file.write(path, STATE)
    assert log_file.read(path) == STATE
    assert path.stat().st_mode & 0o077 == 0, "it holds the workers' secrets"
    assert [one.name for one in tmp_path.iterdir()] == ["record.json"]


def test_a_record_without_a_checksum_is_read(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    path.write_text(json.dumps({"format": "paceline control 1", **STATE}))
    assert log_file.read(path) == STATE


def test_no_flipped_bit_goes_unseen(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    log_file.write(path, STATE)
    whole = path.read_bytes()
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        path.write_bytes(bytes(data))
        with pytest.raises(CheckpointError):
            log_file.read(path)
