# SPDX-License-Identifier: Apache-2.0
"""Exchanges by hand: rings, all-to-alls, hosts, chunks, and what a backward pass hides."""

from __future__ import annotations

import pytest

from paceline.rules.codec import Dense, Layout
from paceline.rules.recipes import rule_from_text
from paceline_plugins.forecast.planner import Network, NetworkLink
from paceline_plugins.forecast.planner.timing import (
    ALL_TO_ALL,
    SUM,
    ExchangeTime,
    OperationTime,
    exchange,
    operation,
    operations_of,
)

from .examples import NUMEL, wire

FLAT = Layout.vector(NUMEL)


def test_the_codecs_say_what_they_do() -> None:
    expected = {
        "dense": (SUM,),
        "low_rank": (SUM, SUM),
        "one_bit": (ALL_TO_ALL, ALL_TO_ALL),
        "bf16": (ALL_TO_ALL, ALL_TO_ALL),
        "e3m0": (ALL_TO_ALL, ALL_TO_ALL),
        "top_k": (ALL_TO_ALL,),
    }
    for name, kinds in expected.items():
        codec = rule_from_text(f"sync(codec={name!r})").codec.at(1 << 30)
        assert operations_of(codec) == kinds and len(kinds) == codec.operations


def test_a_ring_by_hand() -> None:
    """4 workers, 6 steps of 1 ms, and 2 (N-1)/N = 1.5 of 100 ms of bytes."""
    found = operation(SUM, Dense().bytes_sent(FLAT, 4, 0), wire(0.1, 1e-3), 4)
    assert found == OperationTime(pytest.approx(6e-3), pytest.approx(0.15))


def test_an_all_to_all_by_hand() -> None:
    """All messages are under way at once; each costs the processor its part."""
    network = Network("x", NetworkLink(1e-3, 1e6, 1e-4))
    assert operation(ALL_TO_ALL, 1e6, network, 11) == OperationTime(pytest.approx(2e-3), pytest.approx(1.0))


def test_hosts_first_by_hand() -> None:
    """2 hosts of 4: between them 2 (H-1)/H of the bytes once, and 2 latencies instead of 14; inside two all-to-alls."""
    network = wire(0.1, 5e-3, per_host=4, faster=10)
    flat = exchange(rule_from_text("sync(chunks=1)"), FLAT, 0, network, 8)
    hosts = exchange(rule_from_text("sync(chunks=1, dimensions='hosts')"), FLAT, 0, network, 8)
    assert flat.payload_s == pytest.approx(0.175 + 14 * 5e-3)
    assert hosts.payload_s == pytest.approx(0.1 + 2 * 5e-3 + 0.15 / 10)
    assert hosts.sent_bytes == pytest.approx(flat.sent_bytes)


def test_a_backward_pass_hides_what_fits() -> None:
    found = ExchangeTime(payload_s=0.8, header_s=0.0, footer_s=0.0, chunks=8, sent_bytes=0)
    assert found.exposed_s(0.0) == pytest.approx(0.8)  # nothing to hide behind
    assert found.exposed_s(0.4) == pytest.approx(0.8 - 0.4 * 7 / 8)
    assert found.exposed_s(10.0) == pytest.approx(0.1)  # the last chunk leaves when all is over
    late = ExchangeTime(payload_s=0.8, header_s=2.0, footer_s=0.5, chunks=8, sent_bytes=0)
    assert late.exposed_s(0.4) == pytest.approx(1.6 + 0.5)


def test_the_formula_is_that_of_a_queue() -> None:
    found = ExchangeTime(payload_s=0.8, header_s=0.0, footer_s=0.0, chunks=8, sent_bytes=0)
    for backward_s in (0.1, 0.5, 0.9, 1.5):
        free_s = 0.0
        for k in range(1, 9):
            free_s = max(free_s, backward_s * k / 8) + 0.1
        assert found.exposed_s(backward_s) == pytest.approx(free_s - backward_s)
