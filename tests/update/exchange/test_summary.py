# SPDX-License-Identifier: Apache-2.0
"""The summary of an exchange's headers: the same on all workers, and made once for all virtual ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import paceline
from paceline.core.world import World
from paceline.errors import DesyncError, MismatchError
from paceline.update.exchange.exchanger import (
    NO_PAYLOAD,
    WARMUP_END,
    ExchangeHeader,
    ExchangeSummary,
    agree,
    summary_of,
)
from tests.helpers import attached, simulate

HEADER = ExchangeHeader(3, WARMUP_END, False, False, True, 4, 1.5, 4.0, 12, 77)


def rows(*headers: ExchangeHeader) -> bytes:
    return torch.stack([header.row for header in headers]).numpy().tobytes()


def test_it_is_what_the_headers_say() -> None:
    other = replace(HEADER, minibatches=2, factor=2.0)
    summary = summary_of(rows(HEADER, other), 2)
    assert summary.headers == (HEADER, other) and summary.minibatches == [4, 2] and summary.weight == 6.0
    assert summary_of(rows(HEADER, other), 2) is summary


def test_a_header_in_an_older_checkpoint_says_the_same() -> None:
    header = replace(HEADER, early=True, place=5)
    row = header.row.tolist()
    row[4] |= 1 << 4 | 1 << 5  # a suspect, and watched, by audits that are no more
    assert ExchangeHeader.unpack(row) == header


@pytest.mark.parametrize(
    ("change", "error"),
    [({"sequence": 4}, MismatchError), ({"checksum": 78}, DesyncError), ({"kind": NO_PAYLOAD, "leaving": True}, None)],
)
def test_what_is_not_alike_is_looked_at(change: dict[str, Any], error: type[Exception] | None) -> None:
    world = World(0, 3, 0, 3, "here", ("here",) * 3)
    agree(ExchangeSummary((HEADER,) * 3), world)
    summary = ExchangeSummary((HEADER, replace(HEADER, **change), HEADER))
    assert ExchangeSummary((HEADER,) * 3).alike and not summary.alike
    if error is None:
        agree(summary, world)
    else:
        with pytest.raises(error):
            agree(summary, world)


@pytest.mark.parametrize("workers", [4, 16])
def test_the_work_for_a_header_does_not_grow_with_the_workers(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: Counter[str] = Counter()
    unpack, loads = ExchangeHeader.unpack, paceline.communication.base.json.loads

    def unpacked(row: list[int]) -> ExchangeHeader:
        calls["headers"] += 1
        return unpack(row)

    def loaded(text: bytes) -> Any:
        calls["texts"] += 1
        return loads(text)

    monkeypatch.setattr(ExchangeHeader, "unpack", unpacked)
    monkeypatch.setattr("paceline.communication.base.json.loads", loaded)
    blocks: list[int] = []

    def program() -> None:
        with attached(nn.Linear(2, 1), "bmuf(period=2)", lr=0.1) as (run, model, optimizer):
            for _ in range(6):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        blocks.append(run.blocks)

    simulate(program, workers)
    assert blocks == [3] * workers
    assert 3 * workers <= calls["headers"] <= 6 * workers  # one more where they end
    assert calls["texts"] <= workers
