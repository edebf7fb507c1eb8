# SPDX-License-Identifier: Apache-2.0
"""Bytes and rates as people write them."""

from __future__ import annotations

import pytest

from paceline.errors import DataError
from paceline_plugins.data.packed.sizes import bytes_text, parse_bytes, parse_rate


@pytest.mark.parametrize(
    ("text", "count"),
    [("64MiB", 64 << 20), ("200GB", 200 * 10**9), ("1k", 1000), ("17", 17), ("1.5 kib", 1536), ("2g", 2 * 10**9)],
)
def test_sizes(text: str, count: int) -> None:
    assert parse_bytes(text, "--cache") == count


@pytest.mark.parametrize("text", ["", "0", "many", "-5MB", "5 iB", "1Gbit", "nan"])
def test_an_invalid_size_is_refused_by_its_option(text: str) -> None:
    with pytest.raises(DataError, match=r"--cache must be a size .*got"):
        parse_bytes(text, "--cache")


@pytest.mark.parametrize(
    ("text", "bytes_s"),
    [
        ("1Gbit", 1.25e8),
        ("200 Mbit/s", 2.5e7),
        ("10Gbps", 1.25e9),
        ("100MB", 1e8),
        ("100MiB/s", 100 << 20),
        ("8bit", 1.0),
        ("10Gb", None),  # bits or bytes?
        ("0bit", None),
        ("fast", None),
    ],
)
def test_rates(text: str, bytes_s: float | None) -> None:
    if bytes_s is None:
        with pytest.raises(DataError, match="--link must be a rate"):
            parse_rate(text, "--link")
    else:
        assert parse_rate(text, "--link") == bytes_s


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 KB"), (64 << 20, "67.1 MB")])
def test_bytes_as_text(count: int, text: str) -> None:
    assert bytes_text(count) == text
