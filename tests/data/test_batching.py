# SPDX-License-Identifier: Apache-2.0
"""Blocks of tickets: how many go together, and that none is forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from paceline.data.workers.batching import BLOCK_BYTES, MOST_BATCHES, BatchRequest, IpcBatch, RequestBlocks


def requests(count: int, size: int = 4, epoch: int = 0, begin: int = 0) -> Iterator[BatchRequest]:
    """Consecutive samples."""
    return iter([BatchRequest(epoch, list(range(k, k + size))) for k in range(begin, begin + count * size, size)])


def made(block: list[BatchRequest], count: int | None = None, nbytes: int = 100, batch_s: float = 0.0) -> IpcBatch:
    """What comes back for a block of which `count` batches were made."""
    items: list[Any] = [request.ids for request in block[:count]]
    return IpcBatch(items, nbytes * len(items), batch_s * len(items))


def test_blocks_double_up_to_a_limit() -> None:
    blocks, sizes = RequestBlocks(requests(1000)), []
    for _ in range(9):
        block = next(blocks)
        sizes.append(len(block))
        ipc_batch = made(block)
        blocks.came(ipc_batch)
        blocks.adapt(ipc_batch, 0.0)
    assert sizes == [1, 2, 4, 8, 16, 32, 64, 64, 64] and MOST_BATCHES == 64


@pytest.mark.parametrize(
    ("nbytes", "made_s", "used_s", "want"),
    [
        (BLOCK_BYTES // 5, 0.0, None, 5),
        (10 * BLOCK_BYTES, 0.0, None, 1),
        (1, 0.0, 0.03, 3),
        (1, 0.0, 2.0, 1),
        (1, 0.01, 0.001, 5),
        (1, 1.0, 0.001, 1),
    ],
)
def test_blocks_are_bounded_in_bytes_and_in_time(nbytes: int, made_s: float, used_s: float | None, want: int) -> None:
    blocks = RequestBlocks(requests(1000))
    for _ in range(8):
        ipc_batch = made(next(blocks), nbytes=nbytes, batch_s=made_s)
        blocks.came(ipc_batch)
        blocks.adapt(ipc_batch, used_s)
    assert blocks.size == want


def test_what_was_not_made_is_asked_for_again_before_anything_new() -> None:
    blocks = RequestBlocks(requests(8))
    blocks.size = 5
    block = next(blocks)
    rest = next(blocks)
    assert [len(block), len(rest)] == [5, 3] and next(blocks) == []  # kept going: the last may come back in part
    blocks.came(made(block, 3))
    blocks.size = 1
    assert [next(blocks), next(blocks)] == [block[3:4], block[4:5]]
    assert blocks.came(made(rest)) == 5
    blocks.came(made([]))
    assert next(blocks) == []
    assert [blocks.came(made(block[3:4])), blocks.came(made(block[4:5]))] == [3, 4]
    assert next(blocks, None) is None
