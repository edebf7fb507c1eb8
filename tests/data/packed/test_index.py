# SPDX-License-Identifier: Apache-2.0
"""The index and the offsets: round trips and refusals."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest

from paceline.errors import DataError
from paceline_plugins.data.packed.index import Index, PackedShard, offsets_from_bytes, offsets_to_bytes

SHARD = PackedShard("shard-00000.tar", 4 * 1024 + 1024, "a" * 64, 4, "b" * 64)
OFFSETS = np.arange(5, dtype=np.int64) * 1024


def test_the_index_round_trip() -> None:
    other = PackedShard("shard-00001.tar", 2048, "c" * 64, 1, "d" * 64)
    index = Index((SHARD, other))
    assert Index.from_json(index.to_json().encode(), "here") == index
    assert (index.samples, index.total_bytes) == (5, 5 * 1024 + 2048)


def changed(**changes: Any) -> bytes:
    """An index whose first shard, or whose top, has other values."""
    found = json.loads(Index((SHARD,)).to_json())
    for name, value in changes.items():
        (found["shards"][0] if name in found["shards"][0] and name != "samples" else found)[name] = value
    return json.dumps(found).encode()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"{", "is no JSON"),
        (b"[" * 100_000, "is no JSON"),
        (b"[]", "not the index of a packed data set"),
        (changed(format="mds"), "not the index of a packed data set"),
        (changed(version=2), "has version 2, this is for 1"),
        (changed(shards=[]), "names no shards"),
        (changed(shards=[{}]), "shard 0 makes no sense"),
        (changed(samples=5), "says 5 samples, its shards"),
        (changed(name="../../etc/passwd.tar"), "shard 0 makes no sense"),
        (changed(name="/etc/passwd.tar"), "shard 0 makes no sense"),
        (changed(name="shard.zip"), "shard 0 makes no sense"),
        (changed(bytes=-1), "shard 0 makes no sense"),
        (changed(bytes=True), "shard 0 makes no sense"),
        (changed(bytes="5120"), "shard 0 makes no sense"),
        (changed(sha256="xyz"), "shard 0 makes no sense"),
        (json.dumps({**json.loads(changed()), "shards": 2 * json.loads(changed())["shards"]}).encode(), "twice"),
    ],
)
def test_an_inconsistent_index_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(DataError, match=f"^here.*{says}"):
        Index.from_json(raw, "here")


def test_the_offsets_round_trip() -> None:
    raw = offsets_to_bytes(OFFSETS)
    assert np.array_equal(offsets_from_bytes(raw, SHARD, "here"), OFFSETS)
    assert np.array_equal(np.load(io.BytesIO(raw)), OFFSETS)  # numpy's own format


def saved(array: Any) -> bytes:
    raw = io.BytesIO()
    np.save(raw, array, allow_pickle=True)
    return raw.getvalue()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "cannot be read"),
        (offsets_to_bytes(OFFSETS)[:40], "cannot be read"),
        (offsets_to_bytes(OFFSETS)[:-1], r"holds int64\[5\] in 39 bytes, not int64\[5\]"),
        (offsets_to_bytes(OFFSETS).replace(b"(5,), ", b"(10000000000000,), ")[:128], r"holds int64\[10000000000000\]"),
        (saved(np.array([print], dtype=object)), "holds object"),  # would have to be unpickled
        (saved(OFFSETS.astype(np.int32)), "holds int32"),
        (saved(OFFSETS[:-1]), r"not int64\[5\]"),
        (saved(OFFSETS + 512), "do not fit"),
        (saved(OFFSETS[::-1].copy()), "do not fit"),
        (saved(np.array([0, 1000, 2048, 3072, 4096])), "do not fit"),
        (saved(np.array([0, 1024, 1024, 3072, 4096])), "do not fit"),
        (saved(np.array([0, 1024, 2048, 3072, 1 << 50])), "do not fit"),
    ],
)
def test_offsets_that_do_not_fit_the_shard_are_refused(raw: bytes, says: str) -> None:
    with pytest.raises(DataError, match=f"^here.*{says}"):
        offsets_from_bytes(raw, SHARD, "here")
