# SPDX-License-Identifier: Apache-2.0
"""The tar format, against tarfile and against hostile archives."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from paceline.errors import DataError
from paceline_plugins.data.packed.tar import BLOCK, END, TarStream, make_header, padding, parse_header, split_name

LARGEST = 10_000


def archive(*members: tuple[str, bytes], format: int = tarfile.PAX_FORMAT, **more: Any) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w", format=format) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            for key, value in more.items():
                setattr(info, key, value)
            tar.addfile(info, io.BytesIO(data))
    return raw.getvalue()


def read(raw: bytes) -> list[tuple[str, bytes]]:
    return [(member.name, member.data) for member in TarStream(io.BytesIO(raw), "some.tar", LARGEST)]


@pytest.mark.parametrize("format", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_archives_of_tarfile_are_read(format: int) -> None:
    members = [("a.txt", b""), ("b/c.jpg", bytes(range(256)) * 3), ("d.bin", b"x" * 512)]
    assert read(archive(*members, format=format)) == members


@pytest.mark.parametrize("format", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_long_names_and_names_of_other_alphabets_come_back(format: int) -> None:
    members = [("x" * 300 + ".txt", b"1"), ("語" * 60 + ".txt", b"2"), ("short.txt", b"3")]
    assert read(archive(*members, format=format)) == members


def test_headers_are_those_of_tarfile() -> None:
    raw = make_header("000000001.jpg", 5) + b"hello" + bytes(padding(5)) + END
    with tarfile.open(fileobj=io.BytesIO(raw)) as tar:
        (member,) = tar.getmembers()
        assert (member.name, member.size, member.mode, member.mtime) == ("000000001.jpg", 5, 0o644, 0)
        extracted = tar.extractfile(member)
        assert extracted is not None and extracted.read() == b"hello"
    assert parse_header(raw[:BLOCK], "here") == ("000000001.jpg", 5, b"0")
    for name, size in (("a", 0), ("x" * 100, 8**11 - 1), ("000000001.jpg", 12345)):
        theirs = tarfile.TarInfo(name)
        theirs.size = size
        assert make_header(name, size) == theirs.tobuf(tarfile.USTAR_FORMAT)


def test_a_member_that_does_not_fit_ustar_is_refused() -> None:
    with pytest.raises(DataError, match="does not fit"):
        make_header("a" * 101, 1)
    with pytest.raises(DataError, match="does not fit"):
        make_header("a", 8**11)
    with pytest.raises(DataError, match="does not fit"):
        make_header("é", 1)


@pytest.mark.parametrize(
    ("kind", "what"),
    [(tarfile.SYMTYPE, "symbolic link"), (tarfile.LNKTYPE, "hard link"), (tarfile.FIFOTYPE, "pipe"), (b"S", "b'S'")],
)
def test_a_member_without_data_is_refused_by_name(kind: bytes, what: str) -> None:
    with pytest.raises(DataError, match=rf"some.tar at byte 0: 'evil' is .*{what}"):
        read(archive(("evil", b""), type=kind, linkname="/etc/passwd"))


def header(size_field: bytes) -> bytes:
    raw = bytearray(make_header("big", 0))
    raw[124:136] = size_field
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    return bytes(raw)


@pytest.mark.parametrize("body", [b"0 path=a\n", b"99999", b"x path=a\n", b"-3 a=b\n", b"12 size=abc\n"])
def test_an_invalid_extended_header_is_refused(body: bytes) -> None:
    raw = bytearray(make_header("x", len(body)))
    raw[156:157] = b"x"
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    with pytest.raises(DataError, match="cannot be read"):
        read(bytes(raw) + body + bytes(padding(len(body))) + archive(("a", b"1")))


def test_the_size_of_an_extended_header_counts() -> None:
    extended = archive(("a", b"12345"), pax_headers={"comment": "x"})
    assert read(extended) == [("a", b"12345")]
    body = b"10 size=5\n"
    raw = bytearray(make_header("x", len(body)))
    raw[156:157] = b"x"
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(raw)
    data = bytes(raw) + body + bytes(padding(len(body))) + make_header("a", 0) + b"12345" + bytes(padding(5)) + END
    assert read(data) == [("a", b"12345")]


def test_the_error_of_a_damaged_archive_names_the_byte() -> None:
    raw = archive(("a", b"x" * 600), ("b", b"y" * 600))
    with pytest.raises(DataError, match=r"some.tar at byte 1536: cut off within 'b', 88 of 600 bytes"):
        read(raw[: 2048 + 88])
    with pytest.raises(DataError, match=r"some.tar at byte 1536: cut off within a header, 100 of 512"):
        read(raw[: 1536 + 100])
    with pytest.raises(DataError, match=r"some.tar at byte 1536: no tar header"):
        read(raw[:1540] + b"?" + raw[1541:])
    with pytest.raises(DataError, match="cut off within a header, 0 of 512"):
        read(b"")
    assert len(read(raw[: 2 * 1536])) == 2  # only the end mark is missing


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a/b.jpg", ("a/b", "jpg")),
        ("a.x/b.seg.png", ("a.x/b", "seg.png")),
        ("README", ("README", "")),
        ("./b.c", ("./b", "c")),
    ],
)
def test_keys_end_at_the_first_dot_of_the_last_part(name: str, parts: tuple[str, str]) -> None:
    assert split_name(name) == parts


def test_an_extended_header_is_bounded() -> None:
    with pytest.raises(DataError, match="extended header of 100000 bytes"):
        raw = bytearray(make_header("x", 100_000))
        raw[156:157] = b"x"
        raw[148:156] = b" " * 8
        raw[148:156] = b"%06o\0 " % sum(raw)
        read(bytes(raw) + bytes(100_000))


def test_a_member_that_claims_to_be_huge_is_refused_before_it_is_read() -> None:
    with pytest.raises(DataError, match=r"'big' has 8589934591 bytes, more than the largest sample \(10000\)"):
        read(header(b"77777777777\0"))
    with pytest.raises(DataError, match=f"has {1 << 80} bytes"):
        read(header(b"\x80" + (1 << 80).to_bytes(11, "big")))
    with pytest.raises(DataError, match="no tar header here"):
        read(header(b"\xff" * 12))
