# SPDX-License-Identifier: Apache-2.0
"""Kaldi's archives, written here byte by byte from the format's definition."""

from __future__ import annotations

import io
import json
import struct
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline_plugins.data.packed import DataError, open_source
from paceline_plugins.data.packed.packing import Members

from ..made import by_key

FEATURES = np.arange(12, dtype=np.float32).reshape(4, 3) / 8


def matrix(values: NDArray[Any], token: bytes = b"FM") -> bytes:
    kind = "<f8" if token[:1] == b"D" else "<f4"
    counts = b"".join(b"\4" + struct.pack("<i", count) for count in values.shape)
    return b"\0B" + token + b" " + counts + values.astype(kind).tobytes()


def wave_file() -> bytes:
    raw = io.BytesIO()
    with wave.open(raw, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(np.arange(100, dtype="<i2").tobytes())
    return raw.getvalue()


def ark(path: Path, **values: bytes) -> dict[str, int]:
    """Write an archive; key -> offset of its value."""
    offsets, raw = {}, b""
    for key, value in values.items():
        raw += key.encode() + b" "
        offsets[key] = len(raw)
        raw += value
    path.write_bytes(raw)
    return offsets


def samples(path: Path, seed: int | None = None, largest: int = 1 << 20) -> list[Members]:
    return [task() for task in open_source(str(path), largest).tasks(seed)]


def array_of(sample: Members) -> NDArray[Any]:
    found: NDArray[Any] = np.load(io.BytesIO(sample["npy"]), allow_pickle=False)
    return found


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (matrix(FEATURES), FEATURES),
        (matrix(FEATURES.astype(np.float64), b"DM"), FEATURES.astype(np.float64)),
        (matrix(FEATURES[0], b"FV"), FEATURES[0]),
        (matrix(FEATURES[0].astype(np.float64), b"DV"), FEATURES[0].astype(np.float64)),
        (matrix(np.zeros((0, 3), np.float32)), np.zeros((0, 3), np.float32)),
    ],
)
def test_plain_values(tmp_path: Path, value: bytes, expected: NDArray[Any]) -> None:
    ark(tmp_path / "a.ark", before=matrix(FEATURES), utt=value, after=matrix(FEATURES))
    found = samples(tmp_path / "a.ark")
    assert [json.loads(sample["source.json"])["key"] for sample in found] == ["before", "utt", "after"]
    assert array_of(found[1]).dtype == expected.dtype
    assert np.array_equal(array_of(found[1]), expected)


def test_two_byte_and_one_byte_matrices(tmp_path: Path) -> None:
    """value = min + range code / (2^bits - 1), rows first."""
    head = struct.pack("<ffii", -1.0, 2.0, 2, 3)
    wide = np.array([[0, 65535, 13107], [26214, 39321, 52428]], dtype="<u2")
    narrow = np.array([[0, 255, 51], [102, 153, 204]], dtype=np.uint8)
    ark(tmp_path / "a.ark", u=b"\0BCM2 " + head + wide.tobytes(), v=b"\0BCM3 " + head + narrow.tobytes())
    expected = np.array([[-1, 1, -0.6], [-0.2, 0.2, 0.6]], dtype=np.float32)
    for sample in samples(tmp_path / "a.ark"):
        assert array_of(sample).dtype == np.float32
        assert np.allclose(array_of(sample), expected, atol=1e-6)


def test_matrices_compressed_by_columns(tmp_path: Path) -> None:
    """Columns first; each code lies on one of three lines between the four marks of its column."""
    head = struct.pack("<ffii", 0.0, 65535.0, 5, 2)
    marks = np.array([[0, 64, 192, 255], [100, 200, 300, 426]], dtype="<u2")
    codes = np.array([[0, 64, 128, 192, 255], [0, 32, 128, 193, 255]], dtype=np.uint8)
    ark(tmp_path / "a.ark", utt=b"\0BCM " + head + marks.tobytes() + codes.tobytes())
    (sample,) = samples(tmp_path / "a.ark")
    assert array_of(sample).shape == (5, 2)
    expected = [[0, 64, 128, 192, 255], [100, 150, 250, 302, 426]]
    assert np.allclose(array_of(sample).T, expected, atol=1e-2)


@pytest.mark.parametrize("seed", [None, 3])
def test_a_list_finds_its_values(tmp_path: Path, seed: int | None) -> None:
    offsets = ark(tmp_path / "a.ark", **{f"utt{k}": matrix(FEATURES + k) for k in range(6)})
    (tmp_path / "7.wav").write_bytes(wave_file() + b"and what follows")
    (tmp_path / "alone.mat").write_bytes(matrix(FEATURES))
    lines = [f"{key} a.ark:{offset}" for key, offset in reversed(offsets.items())]
    lines += ["", f"utt7\t{tmp_path}/7.wav".replace("\t", " "), "utt8 alone.mat"]
    (tmp_path / "feats.scp").write_text("\n".join(lines) + "\n")
    found = by_key(samples(tmp_path / "feats.scp", seed))
    assert list(found)[:6] != sorted(found)[:6]
    assert sorted(found) == [*(f"utt{k}" for k in range(6)), "utt7", "utt8"]
    for k in range(6):
        assert np.array_equal(array_of(found[f"utt{k}"]), FEATURES + k)
    assert found["utt7"] == {"wav": wave_file() + b"and what follows"}
    assert np.array_equal(array_of(found["utt8"]), FEATURES)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (b" [\n 1 2 3 ]\n", "text, or no value of an ark"),
        (b"\0BSM \4\1\0\0\0", "a value of type 'SM'"),
        (b"\0B\4\1\0\0\0\4\7\0\0\0", "a value of type"),
        (matrix(FEATURES)[:-1], "needs 48 bytes, the file has 47 more"),
        (b"\0BFM \4" + struct.pack("<i", 1 << 30) + b"\4" + struct.pack("<i", 1 << 30), f"needs {1 << 62} bytes"),
        (b"\0BFM \4" + struct.pack("<i", -1) + b"\4" + struct.pack("<i", 3), "damaged header"),
        (b"\0BFM \x08" + bytes(20), "damaged header"),
        (b"\0BCM2 " + struct.pack("<ffii", 0, 1, -1, 3), "damaged header"),
        (b"RIFF\xff\xff\xff\xffWAVE", "no wave file whose header says its size"),
        (b"", "needs 2 bytes"),
    ],
)
def test_errors_of_an_ark_name_file_and_byte(tmp_path: Path, value: bytes, says: str) -> None:
    ark(tmp_path / "a.ark", utt=value)
    with pytest.raises(DataError, match=rf"a\.ark at byte 4: .*{says}"):
        samples(tmp_path / "a.ark")


@pytest.mark.parametrize("raw", [b"\0\1\2", b"x" * 5000, b"nospace", b" x", b"utt\n"])
def test_a_file_that_is_no_ark_is_an_error(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "a.ark").write_bytes(raw)
    with pytest.raises(DataError, match=r"a\.ark at byte 0: no key of an ark here"):
        samples(tmp_path / "a.ark")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("utt", "is not `utt path:offset`"),
        ("utt rm -rf / |", "is a command, which is never run"),
        ("utt a.ark:4[0:1]", "asks for a part of a matrix"),
        ("utt gone.ark:4", "gone.ark does not exist, seen from here or from the list"),
        ("utt a.ark:5", "text, or no value"),
        ("utt a.ark:4000", "needs 2 bytes"),
        ("utt noextension", "has no extension"),
    ],
)
def test_the_error_of_a_line_names_it(tmp_path: Path, line: str, says: str) -> None:
    ark(tmp_path / "a.ark", utt=matrix(FEATURES))
    (tmp_path / "noextension").write_bytes(b"something")
    (tmp_path / "a.scp").write_text(f"utt a.ark:4\n{line}\n")
    with pytest.raises(DataError, match=rf"a\.scp line 2.*{says}"):
        samples(tmp_path / "a.scp")


@pytest.mark.filterwarnings("ignore")  # of another library
def test_kaldiio_agrees(tmp_path: Path) -> None:
    kaldiio = pytest.importorskip("kaldiio")
    values = np.random.default_rng(0).normal(size=(50, 13)).astype(np.float32)
    for method in (None, 2, 3, 5):  # none; by columns; two bytes; one byte
        name = str(tmp_path / f"{method}")
        more = {} if method is None else {"compression_method": method}
        kaldiio.save_ark(f"{name}.ark", {"a": values, "b": values[:7]}, scp=f"{name}.scp", **more)
        theirs = dict(kaldiio.load_ark(f"{name}.ark"))
        for suffix in ("ark", "scp"):
            ours = {key: array_of(sample) for key, sample in by_key(samples(Path(f"{name}.{suffix}"))).items()}
            assert set(ours) == {"a", "b"}
            for key in ours:
                assert np.allclose(ours[key], theirs[key], atol=1e-5)
                assert np.allclose(ours[key], (values if key == "a" else values[:7]), atol=0.1)


def test_a_value_is_bounded(tmp_path: Path) -> None:
    ark(tmp_path / "a.ark", utt=matrix(FEATURES))
    with pytest.raises(DataError, match="a value of 48 bytes, more than the largest sample"):
        samples(tmp_path / "a.ark", largest=40)
